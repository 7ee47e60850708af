"""Neighbors by global ids: every ghost gets the cell with its id; what is refused."""

import numpy as np
import pytest

import mpishare
from mpishare import MismatchError
from tests.helpers.halos import attempt, check_refusal, on_host, some

TWO = pytest.mark.ranks(min=2)


def random_ids(rng, size):
    """For each rank its ids and how many it owns: some ranks own nothing, ghosts repeat."""
    count = int(rng.integers(1, 60))
    most = int(rng.choice([count, 10 * count, 1 << 62]))
    ids = rng.choice(most, 2 * count) if most < 1 << 40 else rng.integers(-most, most, 2 * count)
    ids = np.unique(ids)
    owners = rng.integers(0, size, len(ids)) % int(rng.integers(1, size + 1))
    found = []
    for rank in range(size):
        owned = rng.permutation(ids[owners == rank])
        ghosts = rng.choice(ids, int(rng.integers(0, 2 * count)))
        found.append((np.concatenate([owned, ghosts]), len(owned)))
    return found


def values_of(ids):
    """What the cell with that id holds."""
    return ids % 1009 + 0.5


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_random_meshes(node, axis):
    for seed in range(some(node, 12)):
        rng = np.random.default_rng([seed, node.size, 21])
        ids, n_owned = random_ids(rng, node.size)[node.rank]
        right = np.stack([values_of(ids), -values_of(ids)], axis=1 if axis == 0 else 0)
        start = right.copy()
        np.moveaxis(start, axis, 0)[n_owned:] = -1
        field = node.xp.asarray(start)
        with mpishare.NeighborExchange.from_global_ids(
            node.comm, ids, n_owned, field, axis=axis, node=node
        ) as ex:
            ex.exchange()
        assert np.array_equal(on_host(field), right), (seed, ids, n_owned)


def test_the_reverse_adds_every_ghost_to_its_owner(node):
    rng = np.random.default_rng([node.size, 22])
    mesh = random_ids(rng, node.size)
    ids, n_owned = mesh[node.rank]
    field = node.xp.ones(len(ids))
    with mpishare.NeighborExchange.from_global_ids(node.comm, ids, n_owned, field, node=node) as ex:
        ex.accumulate()
    ghosts = np.concatenate([each[n:] for each, n in mesh])
    right = [1 + np.count_nonzero(ghosts == id_) for id_ in ids[:n_owned]]
    assert on_host(field).tolist() == right + [0] * (len(ids) - n_owned)


def test_ids_of_any_integers(node):
    """Lists, and arrays of any width, on the GPU too; the user's may be changed afterwards."""
    right = (node.rank + 1) % node.size
    for make in (list, np.uint8, np.int16, np.uint64, node.xp.asarray):
        ids = [2 * node.rank, 2 * node.rank + 1, 2 * right]
        ids = make(ids)
        field = node.xp.asarray([2.0 * node.rank, 1, -1])
        ex = mpishare.NeighborExchange.from_global_ids(node.comm, ids, 2, field, node=node)
        ids[2] = 77
        ex.exchange()
        assert on_host(field).tolist() == [2 * node.rank, 1, 2 * right]
        ex.close()


def test_a_rank_without_places_and_a_mesh_without_ghosts(node):
    ids = np.arange(3 * node.rank)
    ids += int(ids.sum())  # apart from those of other ranks
    ids = ids + 100 * node.rank
    field = node.xp.asarray(ids + 0.0)
    ex = mpishare.NeighborExchange.from_global_ids(node.comm, ids, len(ids), field, node=node)
    ex.exchange()
    assert ex.routes == {}
    assert on_host(field).tolist() == ids.tolist()
    ex.close()


def told(node, ids, n_owned, **options):
    """Make the plan, as `attempt` does."""
    options = {"fields": node.xp.zeros(len(ids) if hasattr(ids, "__len__") else 3), **options}
    make = mpishare.NeighborExchange.from_global_ids
    return attempt(node.comm, lambda: make(node.comm, ids, n_owned, node=node, **options))


def ring_ids(node):
    """Two owned places, and a ghost of the next rank's first."""
    return [2 * node.rank, 2 * node.rank + 1, 2 * ((node.rank + 1) % node.size)]


def still_works(node):
    assert told(node, ring_ids(node), 2)[0] is None


BAD = {
    "float": ([0.0, 1.0, 2.0], 2, TypeError, "ids must be ints"),
    "bool": ([True, False, True], 2, TypeError, "ids must be ints"),
    "two axes": ([[0], [1], [2]], 2, TypeError, "ids must be ints"),
    "a number": (3, 2, TypeError, "ids must be ints"),
    "too few": ([0, 1], 2, ValueError, "there are 2 ids, the fields have 3"),
    "huge": (np.array([0, 1, 1 << 63], "u8"), 2, ValueError, "9223372036854775808"),
    "owned twice": ([10000, 10001, 10000], 3, ValueError, "names id 10000 twice"),
    "n_owned is negative": ([10000, 10001, 10002], -1, ValueError, "n_owned is -1"),
    "n_owned is too large": ([10000, 10001, 10002], 4, ValueError, "n_owned is 4"),
    "n_owned is a float": ([10000, 10001, 10002], 2.0, TypeError, "n_owned"),
}


@pytest.mark.parametrize("everywhere", [True, False], ids=["everywhere", "on one rank"])
def test_bad_arguments(node, everywhere):
    def make(given):
        field = node.xp.zeros(3)
        return mpishare.NeighborExchange.from_global_ids(node.comm, *given, field, node=node)

    for ids, n_owned, kind, words in BAD.values():
        right = ring_ids(node), 2
        check_refusal(node.comm, make, (ids, n_owned), right, kind, words, everywhere)
    still_works(node)


@pytest.mark.parametrize(
    ("at", "wrong", "words"),
    [
        pytest.param(
            slice(1, 2), [0], "two ranks own the same id: id 0 by ranks 0 and {last}", marks=TWO
        ),
        (
            slice(2, None),
            range(-9, 0),
            "nobody owns id -9, a ghost of rank {last}; id -8, a ghost of rank {last}; id -7, "
            "a ghost of rank {last}, and 6 more",
        ),
    ],
    ids=["owned twice", "owned by nobody"],
)
def test_ids_that_have_not_one_owner(node, at, wrong, words):
    """The same ValueError on every rank; it names the ids and their ranks."""
    last = node.size - 1
    ids = ring_ids(node)
    if node.rank == last:
        ids[at] = wrong
    error, texts = told(node, ids, 2)
    assert type(error) is ValueError, texts
    assert len(set(texts)) == 1, texts
    assert words.format(last=last) in str(error)
    still_works(node)


@TWO
def test_ranks_that_name_their_places_in_different_ways(node):
    array = node.xp.zeros(3)

    def make():
        if node.rank:
            make_of_ids = mpishare.NeighborExchange.from_global_ids
            return make_of_ids(node.comm, ring_ids(node), 2, array, node=node)
        return mpishare.NeighborExchange(node.comm, {}, {}, array, node=node)

    with pytest.raises(MismatchError, match="made of='global ids'") as caught:
        make()
    assert "made of='sends, recvs'" in str(caught.value)
    still_works(node)

"""Exchanges by index and by global ids: any graph, any mesh, and what is refused about one."""

import numpy as np
import pytest

from mpishare import MismatchError, NeighborExchange
from tests.helpers.halos import (
    check_refusals,
    on_host,
    same_error,
    some,
)
from tests.helpers.meshes import random_exchange
from tests.helpers.rings import beside

TWO = pytest.mark.ranks(min=2)


def make(node, sends, recvs, fields, **options):
    return NeighborExchange(node.comm, sends, recvs, fields, node=node, **options)


def make_of_ids(node, ids, n_owned, field, **options):
    return NeighborExchange.from_global_ids(node.comm, ids, n_owned, field, node=node, **options)


@pytest.mark.parametrize("part", range(5))
def test_random_meshes(node, route, part):
    for seed in range(10 * part, 10 * part + some(node, 10)):
        random_exchange(node, node.comm, seed)


def neighbors_on_a_ring(node):
    """Two places to the right neighbor, maybe itself, and two from the left one."""
    left, right = beside(node)
    return {right: [0, 1]}, {left: [2, 3]}


def still_works(node):
    field = node.xp.zeros(4)
    with make(node, *neighbors_on_a_ring(node), field) as ex:
        ex.exchange(field)


def test_nothing_at_all(node, route):
    array = node.xp.arange(4)
    for sends, recvs in [({}, {}), ({node.rank: []}, {}), ({}, {0: np.empty(0)})]:
        with make(node, sends, recvs, array) as ex:
            ex.exchange(array)
            ex.accumulate(array)
            assert ex.routes == {}
    assert on_host(array).tolist() == [0, 1, 2, 3]


def test_masks_and_slices(node, route):
    """Places of a mask are in the order of the axis, those of a slice in its own."""
    left, right = beside(node)
    values = np.arange(8) + 10 * node.rank
    ghosts = np.array([False] * 5 + [True] * 3)
    for sends, recvs, found in [
        ([True, False, True, True, False, False, False, False], ghosts, [0, 2, 3]),
        (slice(4, 1, -1), slice(5, None), [4, 3, 2]),
        (slice(0, 5, 2), ghosts.tolist(), [0, 2, 4]),
        (node.xp.asarray(~ghosts & (np.arange(8) > 1)), slice(-3, None), [2, 3, 4]),
        (np.zeros(8, bool), slice(0), None),
    ]:
        array = node.xp.asarray(values)
        with make(node, {right: sends}, {left: recvs}, array) as ex:
            ex.exchange(array)
        expected = values.copy()
        if found is not None:
            expected[5:] = np.array(found) + 10 * left
        assert on_host(array).tolist() == expected.tolist()


def ring_ids(node):
    """Two owned places, and a ghost of the next rank's first."""
    return [2 * node.rank, 2 * node.rank + 1, 2 * beside(node)[1]]


def test_ids_of_any_integers(node):
    """Lists, and arrays of any width, on the GPU too; the user's may be changed afterwards."""
    for kind in (list, np.uint8, np.int16, np.uint64, node.xp.asarray):
        ids = kind(ring_ids(node))
        field = node.xp.asarray([2.0 * node.rank, 1, -1])
        with make_of_ids(node, ids, 2, field) as ex:
            ids[2] = 77
            ex.exchange(field)
        assert on_host(field).tolist() == [2 * node.rank, 1, 2 * beside(node)[1]]


BAD_PLACES = [
    ([0, 4], ValueError, "4"),
    ([-1], ValueError, "-1"),
    ([0.0, 1.0], TypeError, "int"),
    (np.array([True, False]), ValueError, "a mask of 2 places"),
    (np.array([[True, False]]), TypeError, "mask"),
    ([[0, 1]], TypeError, "int"),
    (["0"], TypeError, "int"),
    (np.array([1 << 63], "u8"), ValueError, "9223372036854775808"),
    (3, (TypeError, ValueError), "int"),
]


@pytest.mark.parametrize("side", [0, 1], ids=["sends", "recvs"])
def test_places_that_are_none(node, side):
    right = neighbors_on_a_ring(node)
    table = []
    for places, *rest in BAD_PLACES:
        wrong = [*right]
        wrong[side] = dict.fromkeys(right[side], places)
        table.append((wrong, *rest))
    check_sides(node, table, right)


def check_sides(node, table, right=({}, {})):
    """Sends and recvs of the last rank are refused on all."""
    check_refusals(node.comm, lambda given: make(node, *given, node.xp.zeros(4)), right, table)
    still_works(node)


BAD_IDS = [
    ([0.0, 1.0, 2.0], 2, TypeError, "ids must be ints"),
    ([True, False, True], 2, TypeError, "ids must be ints"),
    ([[0], [1], [2]], 2, TypeError, "ids must be ints"),
    (3, 2, TypeError, "ids must be ints"),
    ([0, 1], 2, ValueError, "there are 2 ids, the fields have 3"),
    (np.array([0, 1, 1 << 63], "u8"), 2, ValueError, "9223372036854775808"),
    ([10000, 10001, 10000], 3, ValueError, "names id 10000 twice among the 3 that this rank owns"),
    ([10000, 10001, 10002], -1, ValueError, "n_owned is -1"),
    ([10000, 10001, 10002], 4, ValueError, "n_owned is 4"),
    ([10000, 10001, 10002], 2.0, TypeError, "n_owned must be an int"),
    ([10000, 10001, 10002], True, TypeError, "n_owned must be an int"),
]


@pytest.mark.parametrize("everywhere", [True, False], ids=["everywhere", "on one rank"])
def test_ids_that_are_none(node, everywhere):
    table = [((ids, n_owned), *rest) for ids, n_owned, *rest in BAD_IDS]
    make_mesh = lambda given: make_of_ids(node, *given, node.xp.zeros(3))  # noqa: E731
    check_refusals(node.comm, make_mesh, (ring_ids(node), 2), table, everywhere=everywhere)
    still_works(node)


def test_ranks_and_axes_that_are_none(node):
    for rank in (node.size, -1, "0", 1.5, None):
        for sides in (({rank: [0]}, {}), ({}, {rank: [0]})):
            with pytest.raises((ValueError, TypeError), match="rank"):
                make(node, *sides, node.xp.zeros(4))
    for sends in ([[0]], None, 3):
        with pytest.raises(TypeError, match="sends"):
            make(node, sends, {}, node.xp.zeros(4))
    sides = neighbors_on_a_ring(node)
    for axis in (1, -2, 7, 0.5, "0", None):
        error = ValueError if isinstance(axis, int) else (TypeError, ValueError)
        with pytest.raises(error, match="axis"):
            make(node, *sides, node.xp.zeros(4), axis=axis)
    with pytest.raises(ValueError, match=r"extent|length|axis"):
        make(node, *sides, [node.xp.zeros(4), node.xp.zeros(5)])
    still_works(node)


def test_places_that_are_named_twice(node):
    """By two writers, from one rank or two; to be sent and received: who is faster would count."""
    last = node.size - 1
    table = [
        (({last: [0, 0]}, {last: [1, 1]}), ValueError, "recvs names place 1"),
        (({last: [1]}, {last: [1]}), ValueError, "in sends and in recvs"),
    ]
    if last:
        table.append((({0: [0], last: [0]}, {0: [1], last: [1]}), ValueError, "names place 1"))
    check_sides(node, table)


def test_lengths_that_do_not_match(node):
    """The error names both ranks."""
    sender, receiver = 0, node.size - 1
    for sent, received in ((3, 2), (0, 1), (1, 0)):
        sends = {receiver: [0] * sent} if node.rank == sender and sent else {}
        recvs = {sender: list(range(1, 1 + received))} if node.rank == receiver else {}
        said = (
            f"rank {sender} sends {sent} places to rank {receiver}, which expects {received}: "
            f"sends[{receiver}] of rank {sender} and recvs[{sender}] of rank {receiver} must name"
        )
        told = same_error(node.comm, lambda s=sends, r=recvs: make(node, s, r, node.xp.zeros(5)))
        assert said in told
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
    """The error names the ids and their ranks."""
    last = node.size - 1
    ids = ring_ids(node)
    if node.rank == last:
        ids[at] = wrong
    field = node.xp.zeros(len(ids))
    told = same_error(node.comm, lambda: make_of_ids(node, ids, 2, field))
    assert words.format(last=last) in told
    still_works(node)


@TWO
def test_ranks_that_differ(node):
    """All other axes travel whole, so that they must be the same; and so must the dtypes."""
    xp, odd, sides = node.xp, node.rank == node.size - 1, neighbors_on_a_ring(node)
    for one, other in (
        (xp.zeros(4, "f4"), xp.zeros(4, "i4")),
        ([xp.zeros(4)], [xp.zeros(4), xp.zeros(4)]),
        (xp.zeros((4, 2, 3)), xp.zeros((4, 3, 2))),
        (xp.zeros((4, 2)), xp.zeros((4, 3))),
    ):
        with pytest.raises(ValueError, match=r".") as caught:
            make(node, *sides, other if odd else one)
        names = node.comm.allgather(type(caught.value).__name__)
        assert {*names} <= {"MismatchError", "ValueError"}
    with pytest.raises(MismatchError, match="axis"):
        make(node, *sides, xp.zeros((4, 4)), axis=int(odd))
    by_ids = lambda: make_of_ids(node, ring_ids(node), 2, xp.zeros(3))  # noqa: E731
    with pytest.raises(MismatchError, match="made of='global ids'") as caught:
        by_ids() if node.rank else make(node, {}, {}, xp.zeros(3))
    assert "made of='sends, recvs'" in str(caught.value)
    still_works(node)

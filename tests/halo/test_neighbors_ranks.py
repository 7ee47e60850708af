"""Exchanges by index: any graph, and what is refused about one."""

import numpy as np
import pytest

import mpishare
from mpishare import MismatchError
from tests.helpers.halos import (
    DTYPES,
    FORMS,
    HOST_DTYPES,
    HOST_FORMS,
    POISON,
    Field,
    Kind,
    arrays,
    as_indices,
    attempt,
    check,
    check_refusal,
    encode,
    graph_field,
    on_host,
    pause,
    put_graph,
    random_graph,
    some,
)

TWO = pytest.mark.ranks(min=2)


def random_kinds(rng, dtypes, forms):
    """Up to three fields, indexed along one axis, and that axis as it is given."""
    first = int(rng.integers(0, 3))
    counted_from_the_end = bool(rng.integers(2))
    kinds = []
    for _ in range(int(rng.integers(1, 4))):
        extra = first + int(rng.integers(0, 2))
        others = tuple(rng.integers(1, 4, extra).tolist())
        axis = -1 - first if counted_from_the_end else first
        kinds.append(Kind(str(rng.choice(dtypes)), str(rng.choice(forms)), others, (axis,)))
    return kinds, kinds[0].axes[0]


def in_window(node, graph, kind):
    shape = kind.spread(graph.numbers(node.rank)).shape
    return node.allocate_each(Field.nbytes(shape, kind), "u1").array


def random_exchange(node, seed, steps=3):
    rng = np.random.default_rng([seed, node.size, 3])
    graph = random_graph(rng, node.size)
    on_cpu = node.backend == "host"
    dtypes, forms = (DTYPES + HOST_DTYPES, HOST_FORMS) if on_cpu else (DTYPES, FORMS)
    kinds, axis = random_kinds(rng, dtypes, forms)
    flags = rng.integers(0, 2, len(kinds))
    memories = [in_window(node, graph, k) if f else None for k, f in zip(kinds, flags, strict=True)]
    fields = [
        graph_field(node.xp, graph, node.rank, kind, memory)
        for kind, memory in zip(kinds, memories, strict=True)
    ]
    sends, recvs = (as_indices(rng, each[node.rank]) for each in (graph.sends, graph.recvs))
    mine = np.random.default_rng([seed, node.rank, 5])
    ex = mpishare.NeighborExchange(node.comm, sends, recvs, arrays(fields), axis=axis, node=node)
    for step in range(1, steps + 1):
        for at, field in enumerate(fields):
            put_graph(field, graph, node.rank, 10 * step + at)
        pause(mine)
        if rng.random() < 0.5:
            ex.exchange()
        else:
            ex.start(*arrays(fields))
            pause(mine)
            ex.wait()
        try:
            check(fields, 10 * step)
        except AssertionError as error:
            error.add_note(f"seed {seed}: {graph}")
            raise
    expected = {r for r in range(node.size) if len(sends.get(r, [])) or len(recvs.get(r, []))}
    assert set(ex.routes) == expected
    ex.close()


@pytest.mark.parametrize("part", range(3))
def test_random_graphs(node, route, part):
    for seed in range(10 * part, 10 * part + some(node, 10)):
        random_exchange(node, seed)


@pytest.mark.parametrize("part", range(2))
def test_random_graphs_on_the_host(host_node, route, part):
    for seed in range(100 + 8 * part, 108 + 8 * part):
        random_exchange(host_node, seed)


def ring(node, count=2):
    """To the right neighbor, maybe itself: what, where, and the fields' length."""
    right, left = (node.rank + 1) % node.size, (node.rank - 1) % node.size
    return {right: list(range(count))}, {left: list(range(count, 2 * count))}, 2 * count


def test_nothing_at_all(node, route):
    array = node.xp.arange(4)
    for sends, recvs in [({}, {}), ({node.rank: []}, {}), ({}, {0: np.empty(0)})]:
        ex = mpishare.NeighborExchange(node.comm, sends, recvs, array, node=node)
        ex.exchange()
        ex.accumulate()
        assert ex.routes == {}
        ex.close()
    assert on_host(array).tolist() == [0, 1, 2, 3]


def test_fields_of_different_lengths_on_different_ranks(node, route):
    """A rank may have no places at all."""
    length = 0 if node.rank == 0 and node.size > 1 else 3 * node.rank + 2
    sends, recvs = {}, {}
    if node.rank == node.size - 1:
        sends[node.rank], recvs[node.rank] = [0], [length - 1]
    array = node.xp.arange(length, dtype="f4").reshape(length, 1) + 1
    ex = mpishare.NeighborExchange(node.comm, sends, recvs, array, node=node)
    ex.exchange()
    expected = list(range(1, length + 1))
    if sends:
        expected[-1] = 1
    assert on_host(array)[:, 0].tolist() == expected
    ex.close()


def test_masks_and_slices(node, route):
    """Places of a mask are in the order of the axis, those of a slice in its own."""
    right, left = (node.rank + 1) % node.size, (node.rank - 1) % node.size
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
        ex = mpishare.NeighborExchange(node.comm, {right: sends}, {left: recvs}, array, node=node)
        ex.exchange()
        expected = values.copy()
        if found is not None:
            expected[5:] = np.array(found) + 10 * left
        assert on_host(array).tolist() == expected.tolist()
        ex.close()


def test_indices_may_be_changed_afterwards(node):
    """The plan has its own."""
    sends, recvs, length = ring(node)
    sends, recvs = ({r: np.array(p) for r, p in each.items()} for each in (sends, recvs))
    array = node.xp.arange(length) + 10 * node.rank
    ex = mpishare.NeighborExchange(node.comm, sends, recvs, array, node=node)
    for each in (sends, recvs):
        for places in each.values():
            places[...] = 0
        each.clear()
    ex.exchange()
    left = 10 * ((node.rank - 1) % node.size)
    assert on_host(array).tolist()[2:] == [left, left + 1]
    ex.close()


# --- what is refused


def make(node, sends, recvs, fields, **options):
    return mpishare.NeighborExchange(node.comm, sends, recvs, fields, node=node, **options)


def still_works(node):
    sends, recvs, length = ring(node)
    ex = make(node, sends, recvs, node.xp.zeros(length))
    ex.exchange()
    ex.close()


BAD = {
    "too large": ([0, 4], ValueError, "4"),
    "negative": ([-1], ValueError, "-1"),
    "float": ([0.0, 1.0], TypeError, "int"),
    "short mask": (np.array([True, False]), ValueError, "a mask of 2 places"),
    "mask of two axes": (np.array([[True, False]]), TypeError, "mask"),
    "two axes": ([[0, 1]], TypeError, "int"),
    "text": (["0"], TypeError, "int"),
    "huge": (np.array([1 << 63], "u8"), ValueError, "9223372036854775808"),
    "a number": (3, (TypeError, ValueError), "int"),
}


@pytest.mark.parametrize("side", [0, 1], ids=["sends", "recvs"])
def test_places_that_are_none(node, side):
    *right, length = ring(node)
    for places, kind, words in BAD.values():
        wrong = [*right]
        wrong[side] = dict.fromkeys(right[side], places)
        check_refusal(node.comm, ends(node, length), wrong, right, kind, words)
    still_works(node)


def ends(node, length):
    """What makes a plan of sends and recvs."""
    return lambda given: make(node, *given, node.xp.zeros(length))


def test_ranks_that_are_none(node):
    for rank in (node.size, -1, "0", 1.5, None):
        array = node.xp.zeros(4)
        for sends, recvs in (({rank: [0]}, {}), ({}, {rank: [0]})):
            with pytest.raises((ValueError, TypeError), match="rank"):
                make(node, sends, recvs, array)
    for sends in ([[0]], None, 3):
        with pytest.raises(TypeError, match="sends"):
            make(node, sends, {}, node.xp.zeros(4))
    still_works(node)


def test_two_writers_of_one_place(node):
    """Within what comes from one rank, and from two."""
    last = node.size - 1
    cases = [({last: [0, 0]}, {last: [1, 1]})]
    if node.size > 1:
        cases.append(({0: [0], last: [0]}, {0: [1], last: [1]}))
    for wrong in cases:
        check_refusal(node.comm, ends(node, 4), wrong, ({}, {}), ValueError, "recvs names place 1")
    still_works(node)


def test_a_place_that_is_sent_and_received(node):
    """Which of its values should go would depend on who is faster."""
    right, left = (node.rank + 1) % node.size, (node.rank - 1) % node.size
    for sends, recvs in [({right: [2]}, {left: [2]}), ({right: [0, 1]}, {left: [1, 2]})]:
        with pytest.raises(ValueError, match="in sends and in recvs"):
            make(node, sends, recvs, node.xp.zeros(4))
    wrong = {node.size - 1: [1]}, {node.size - 1: [1]}
    words = "in sends and in recvs"
    check_refusal(node.comm, ends(node, 4), wrong, ({}, {}), ValueError, words)
    still_works(node)


def test_lengths_that_do_not_match(node):
    """The same ValueError on all ranks, which names both."""
    sender, receiver = 0, node.size - 1
    for sent, received in ((3, 2), (0, 1), (1, 0)):
        sends = {receiver: [0] * sent} if node.rank == sender else {}
        recvs = {sender: list(range(1, 1 + received))} if node.rank == receiver else {}
        if node.rank == sender and not sent:
            sends = {}
        array = node.xp.zeros(5)
        error, names = attempt(node.comm, lambda s=sends, r=recvs, a=array: make(node, s, r, a))
        assert isinstance(error, ValueError), names
        assert len(set(names)) == 1
        said = f"rank {sender} sends {sent} places to rank {receiver}, which expects {received}"
        assert said in str(error)
    still_works(node)


@TWO
def test_fields_that_differ_between_ranks(node):
    """All other axes travel whole, so that they must be the same; and so must the dtypes."""
    xp = node.xp
    odd = node.rank == node.size - 1
    sends, recvs, length = ring(node)
    pairs = {
        "dtype": (xp.zeros(length, "f4"), xp.zeros(length, "i4")),
        "count": ([xp.zeros(length)], [xp.zeros(length), xp.zeros(length)]),
        "other axes": (xp.zeros((length, 2, 3)), xp.zeros((length, 3, 2))),
        "extent": (xp.zeros((length, 2)), xp.zeros((length, 3))),
    }
    for name, (one, other) in pairs.items():
        error, names = attempt(
            node.comm, lambda f=other if odd else one: make(node, sends, recvs, f)
        )
        assert isinstance(error, ValueError), (name, names)
        assert {text for text, _ in names} <= {"MismatchError", "ValueError"}, (name, names)
    still_works(node)


@TWO
def test_axes_that_differ_between_ranks(node):
    sends, recvs, length = ring(node)
    odd = node.rank == node.size - 1
    array = node.xp.zeros((length, length))
    with pytest.raises(MismatchError, match="axis"):
        make(node, sends, recvs, array, axis=1 if odd else 0)
    still_works(node)


def test_axes_that_are_none(node):
    sends, recvs, length = ring(node)
    for axis in (1, -2, 7):
        with pytest.raises(ValueError, match="axis"):
            make(node, sends, recvs, node.xp.zeros(length), axis=axis)
    for axis in (0.5, "0", None):
        with pytest.raises((TypeError, ValueError), match="axis"):
            make(node, sends, recvs, node.xp.zeros(length), axis=axis)
    with pytest.raises(ValueError, match=r"extent|length|axis"):
        make(node, sends, recvs, [node.xp.zeros(length), node.xp.zeros(length + 1)])
    still_works(node)


# --- accumulate


def totals(graph, kind, weights):
    """What every number of the graph sums up to."""
    count = int(graph.starts[-1]) * int(np.prod(kind.others, dtype=int))
    total = np.zeros(count, "f8")
    for rank in range(graph.size):
        np.add.at(total, kind.spread(graph.numbers(rank)), weights[rank])
    return total


def test_accumulate(node, route):
    """Every received place is added to the one it came from, duplicates as often, then zeroed."""
    for seed in range(some(node, 12)):
        rng = np.random.default_rng([seed, node.size, 9])
        graph = random_graph(rng, node.size)
        kind = Kind("f8" if seed % 2 else "i4", str(rng.choice(FORMS)), (2,) * (seed % 3), (0,))
        shapes = [kind.spread(graph.numbers(rank)).shape for rank in range(node.size)]
        weights = [rng.integers(-50, 50, shape) for shape in shapes]
        memory = in_window(node, graph, kind) if seed % 4 < 2 else None
        field = graph_field(node.xp, graph, node.rank, kind, memory)
        ex = make(node, graph.sends[node.rank], graph.recvs[node.rank], field.array)
        for _ in range(2):
            field.array[...] = node.xp.asarray(weights[node.rank].astype(kind.dtype))
            ex.accumulate()
            own = graph.starts[node.rank] + np.arange(graph.lengths[node.rank])
            expected = totals(graph, kind, weights)[kind.spread(own)]
            ghosts = np.zeros(graph.lengths[node.rank], bool)
            ghosts[graph.ghosts(node.rank)] = True
            expected[ghosts] = 0
            assert np.array_equal(on_host(field.array), expected), (seed, graph)
            # And forth again, on the same plan.
            ex.exchange()
            whole = totals(graph, kind, weights)
            shown = whole[kind.spread(graph.numbers(node.rank))]
            assert np.array_equal(on_host(field.array), shown), (seed, graph)
        ex.close()


def test_accumulate_is_repeatable(node, route):
    """The same bits, whoever comes first."""
    sends = {rank: [0, 0, 1] for rank in range(node.size)}
    recvs = {rank: [2 + 3 * rank + k for k in range(3)] for rank in range(node.size)}
    array = node.xp.empty((2 + 3 * node.size, 40), "f4")
    ex = make(node, sends, recvs, array)
    rng = np.random.default_rng(node.rank)
    values = node.xp.asarray(rng.standard_normal(array.shape).astype("f4") * 1e3)
    mine = np.random.default_rng([node.rank, 2])
    bits = set()
    for _ in range(30):
        array[...] = values
        pause(mine, 0.002, 0.3)
        ex.accumulate()
        bits.add(on_host(array).tobytes())
    assert len(bits) == 1
    ex.close()


def test_the_oracle_of_this_file_can_fail(host_node):
    """One place that is not what it must be is seen."""
    rng = np.random.default_rng(1)
    graph = next(g for g in (random_graph(rng, host_node.size) for _ in range(50)) if
                 all(len(g.ghosts(r)) for r in range(g.size)))  # fmt: skip
    kind = Kind("f8", axes=(0,))
    field = graph_field(np, graph, host_node.rank, kind)
    put_graph(field, graph, host_node.rank, 1)
    assert "are wrong" in field.flaws(1)
    field.array[...] = encode(field.numbers, "f8", 1)
    assert field.flaws(1) == ""
    field.array[graph.ghosts(host_node.rank)[0]] = encode(np.array([POISON]), "f8", 1)[0]
    assert "1 owned cells are wrong" in field.flaws(1)

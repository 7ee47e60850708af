"""Accumulate, the reverse: every ghost is added to the cell that it shadows, then zeroed."""

import numpy as np
import pytest

from mpishare import UnsupportedError
from tests.helpers.halos import (
    FORMS,
    HOST_FORMS,
    POISON,
    Field,
    Kind,
    accumulated,
    arrays,
    check,
    even_case,
    make_fields,
    on_host,
    pause,
    plan,
    put,
    random_case,
    random_kinds,
    some,
    weights,
)

TWO = pytest.mark.ranks(min=2)
DTYPES = ("i4", "i8", "f4", "f8", "c8", "c16")
MORE_DTYPES = (*DTYPES, "i2", "u4", "f2", ">f8")


@pytest.fixture(params=["", "mpi"], ids=["own", "mpi"])
def route(request, monkeypatch):
    """The routes that a plan chooses, and those of a plan over nodes."""
    if request.param:
        monkeypatch.setenv("MPISHARE_ROUTE", request.param)


def fill(node, case, fields, seed):
    """Small integers everywhere, ghosts too: sums of them are exact."""
    for at, field in enumerate(fields):
        values = weights(case, field.kind, node.rank, seed + at, 9)
        field.array[...] = node.xp.asarray(values)


def compare(node, case, fields, seed):
    for at, field in enumerate(fields):
        right = accumulated(case, field.kind, node.rank, seed + at, 9)
        found = on_host(field.array)
        places = np.argwhere(found != right)[:4].tolist()
        assert not places, f"seed {seed}, {case}, {field.kind}: wrong at {places}"


def random_accumulation(node, seed, dtypes, forms):
    rng = np.random.default_rng([seed, node.size, 17])
    case = random_case(rng, node.size)
    kinds, axes = random_kinds(rng, case.naxes, dtypes, forms)
    in_window = rng.integers(0, 2, len(kinds)).astype(bool).tolist()
    fields = make_fields(node, case, node.rank, kinds, in_window)
    other = make_fields(node, case, node.rank, kinds)
    mine = np.random.default_rng([seed, node.rank])
    with plan(node.comm, case, arrays(fields), axes=axes, node=node) as halo:
        for step in range(3):
            now = other if step == 1 else fields
            fill(node, case, now, seed + 100 * step)
            pause(mine)
            halo.accumulate(*(arrays(now) if step else []))
            compare(node, case, now, seed + 100 * step)
            # And forth, on the same plan, whatever came back before.
            for field in now:
                field.poison()
            put(now, 10 * step)
            halo.exchange(*arrays(now))
            check(now, 10 * step)


@pytest.mark.parametrize("part", range(3))
def test_random_plans(node, route, part):
    for seed in range(6 * part, 6 * part + some(node, 6)):
        random_accumulation(node, seed, DTYPES, FORMS)


@pytest.mark.parametrize("part", range(2))
def test_random_plans_on_the_host(host_node, route, part):
    for seed in range(100 + 5 * part, 105 + 5 * part):
        random_accumulation(host_node, seed, MORE_DTYPES, HOST_FORMS)


def test_corners_and_wide_halos(node, route):
    """Cells that are shadowed many times: on both sides, by oneself, in corners."""
    for dims in ((node.size, 1), (1, node.size), (1, 1, node.size)):
        case = even_case(dims, True, 2, 2, corners=True)
        fields = make_fields(node, case, node.rank, [Kind("f8"), Kind("i8", "F")])
        with plan(node.comm, case, arrays(fields), node=node) as halo:
            for seed in range(3):
                fill(node, case, fields, seed)
                halo.accumulate()
                compare(node, case, fields, seed)


def test_ghosts_are_zeroed_and_those_without_an_owner_stay(node, route):
    case = even_case((node.size, 1), (False, True), 3, 2)
    [field] = make_fields(node, case, node.rank, [Kind("f8")])
    ghosts = np.ones(field.numbers.shape, bool)
    ghosts[field.owned] = False
    with plan(node.comm, case, field.array, node=node) as halo:
        field.array[...] = 5
        halo.accumulate()
        found = on_host(field.array)
        assert (found[ghosts & (field.numbers != POISON)] == 0).all()
        assert (found[ghosts & (field.numbers == POISON)] == 5).all()
        # All is zero that could be added: nothing changes any more.
        halo.accumulate()
        assert np.array_equal(on_host(field.array), found)


@pytest.mark.parametrize("corners", [False, True], ids=["faces", "corners"])
def test_adjoint(node, route, corners):
    """<H x, y> = <x, H' y>, with H the exchange."""
    for seed in range(some(node, 6)):
        rng = np.random.default_rng([seed, node.size, 23])
        case = random_case(rng, node.size)
        case = type(case)(case.dims, case.periods, case.splits, case.widths, corners)
        mine = np.random.default_rng([seed, node.rank, 29])
        [field] = make_fields(node, case, node.rank, [Kind("f8")])
        x, y = (mine.integers(-99, 99, field.numbers.shape).astype("f8") for _ in range(2))
        forth, back = node.xp.asarray(x.copy()), node.xp.asarray(y.copy())
        with plan(node.comm, case, forth, node=node) as halo:
            halo.exchange(forth)
            halo.accumulate(back)
        sums = (float((on_host(forth) * y).sum()), float((x * on_host(back)).sum()))
        left, right = map(sum, zip(*node.comm.allgather(sums), strict=True))
        assert left == right, (seed, case)


def test_the_same_bits_whoever_comes_first(node, route):
    """Numbers whose sums depend on the order."""
    case = even_case((node.size, 1, 1), True, 2, 2, corners=True)
    kinds = [Kind("f4"), Kind("c8", "F")]
    fields = make_fields(node, case, node.rank, kinds, [False, True])
    rng = np.random.default_rng(node.rank)
    values = []
    for field in fields:
        scales = 10.0 ** rng.integers(-3, 4, field.numbers.shape)
        value = rng.standard_normal(field.numbers.shape) * scales
        values.append(node.xp.asarray(value.astype(field.kind.dtype)))
    mine = np.random.default_rng([node.rank, 31])
    bits = set()
    with plan(node.comm, case, arrays(fields), node=node) as halo:
        for _ in range(30):
            for field, value in zip(fields, values, strict=True):
                field.array[...] = value
            pause(mine, 0.002, 0.3)
            halo.accumulate()
            bits.add(b"".join(on_host(field.array).tobytes() for field in fields))
    assert len(bits) == 1


def test_ghosts_may_be_overwritten_right_after(node, route):
    """Steps with random delays: a neighbor must have what was there at the call."""
    case = even_case((node.size, 1), True, 3, 1, corners=True)
    fields = make_fields(node, case, node.rank, [Kind("i8")], [True])
    mine = np.random.default_rng([node.rank, 37])
    with plan(node.comm, case, arrays(fields), node=node) as halo:
        for step in range(60):
            fill(node, case, fields, step)
            pause(mine, 0.002, 0.1)
            halo.accumulate()
            kept = fields[0].array.copy()
            fields[0].array[...] = -12345
            pause(mine, 0.002, 0.1)
            fields[0].array[...] = kept
            compare(node, case, fields, step)


def test_what_cannot_be_added(host_node, route):
    """Refused; the exchange goes on."""
    node = host_node
    case = even_case((node.size,), True, 3)
    for dtype in ("?", "f8,i4", "V3", "S7", "M8[us]"):
        fields = make_fields(node, case, node.rank, [Kind("f8"), Kind(dtype)])
        with plan(node.comm, case, arrays(fields), node=node) as halo:
            with pytest.raises((TypeError, UnsupportedError), match="add"):
                halo.accumulate()
            put(fields, 1)
            halo.exchange()
            check(fields, 1)


def test_one_way_plans(node, route):
    """Ghosts on one side only: what flows back flows one way too."""
    case = even_case((node.size,), False, 3, ((2, 0),))
    fields = make_fields(node, case, node.rank, [Kind("i8")])
    with plan(node.comm, case, arrays(fields), node=node) as halo:
        for seed in range(40):
            fill(node, case, fields, seed)
            halo.accumulate()
            compare(node, case, fields, seed)


def test_the_oracle_can_fail(host_node):
    """Against the sum by hand, and against a cell that was left out."""
    case = even_case((host_node.size,), True, 3, 1)
    kind = Kind("i8")
    every = [weights(case, kind, rank, 1, 9) for rank in range(host_node.size)]
    mine, right = every[host_node.rank], accumulated(case, kind, host_node.rank, 1, 9)
    left = every[(host_node.rank - 1) % host_node.size]
    after = every[(host_node.rank + 1) % host_node.size]
    by_hand = [0, mine[1] + left[4], mine[2], mine[3] + after[0], 0]
    assert right.tolist() == by_hand
    field = Field.of(np, case, host_node.rank, kind)
    field.array[...] = right
    field.array[1] += 1
    with pytest.raises(AssertionError, match="wrong at"):
        compare(host_node, case, [field], 1)

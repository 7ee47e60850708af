"""Accumulate, the reverse: every ghost is added to the cell that it shadows, then zeroed."""

import dataclasses

import numpy as np
import pytest

from mpishare import HaloExchange, UnsupportedError
from tests.helpers.halos import (
    FORMS,
    HOST_FORMS,
    POISON,
    Kind,
    accumulated,
    arrays,
    even_case,
    exchange_step,
    exchanging,
    make_fields,
    on_host,
    pause,
    random_case,
    random_kinds,
    some,
    weights,
)

DTYPES = ("i4", "i8", "f4", "f8", "c8", "c16")
MORE_DTYPES = (*DTYPES, "i2", "u4", "f2", ">f8")


def fill(node, case, fields, seed):
    """Small integers everywhere, ghosts too: sums of them are exact."""
    for at, field in enumerate(fields):
        values = weights(case, field.kind, node.rank, seed + at, 9)
        field.array[...] = node.xp.asarray(values)


def compare(node, case, fields, seed):
    for at, field in enumerate(fields):
        right = accumulated(case, field.kind, node.rank, seed + at, 9)
        places = np.argwhere(on_host(field.array) != right)[:4].tolist()
        assert not places, f"seed {seed}, {case}, {field.kind}: wrong at {places}"


def check_steps(node, case, kinds, steps, in_window=False):
    """Accumulate on new values at each step."""
    with exchanging(node, case, kinds, in_window) as (halo, fields):
        for step in range(steps):
            fill(node, case, fields, step)
            halo.accumulate(*arrays(fields))
            compare(node, case, fields, step)


def random_accumulation(node, seed, dtypes, forms):
    rng = np.random.default_rng([seed, node.size, 17])
    case = random_case(rng, node.size)
    kinds, axes = random_kinds(rng, case.naxes, dtypes, forms)
    in_window = rng.integers(0, 2, len(kinds)).astype(bool).tolist()
    other = make_fields(node, case, kinds)
    mine = np.random.default_rng([seed, node.rank])
    with exchanging(node, case, kinds, in_window, axes=axes) as (halo, fields):
        for step in range(3):
            now = other if step == 1 else fields
            fill(node, case, now, seed + 100 * step)
            pause(mine)
            halo.accumulate(*arrays(now))
            compare(node, case, now, seed + 100 * step)
            # And forth, on the same plan, whatever came back before.
            for field in now:
                field.poison()
            exchange_step(halo, now, 10 * step, *arrays(now))


@pytest.mark.parametrize("part", range(4))
def test_random_plans(node, route, part):
    """On the host also of dtypes and orders in memory that CuPy has not."""
    of_kinds = (MORE_DTYPES, HOST_FORMS) if node.backend == "host" else (DTYPES, FORMS)
    for seed in range(7 * part, 7 * part + some(node, 7)):
        random_accumulation(node, seed, *of_kinds)


def test_corners_and_wide_halos(node, every_route):
    """Cells that are shadowed many times: on both sides, by oneself, in corners."""
    kinds = [Kind("f8"), Kind("f4", "F"), Kind("i4", "strided"), Kind("i8", "F"), Kind("c16")]
    for dims in ((node.size, 1), (1, node.size), (1, 1, node.size)):
        check_steps(node, even_case(dims, True, 2, 2, corners=True), kinds, 3)


def test_ghosts_are_zeroed_and_those_without_an_owner_stay(node, route):
    case = even_case((node.size, 1), (False, True), 3, 2)
    with exchanging(node, case) as (halo, [field]):
        field.array[...] = 5
        halo.accumulate(field.array)
        ghosts = np.ones(field.numbers.shape, bool)
        ghosts[field.owned] = False
        found = on_host(field.array)
        assert (found[ghosts & (field.numbers != POISON)] == 0).all()
        assert (found[ghosts & (field.numbers == POISON)] == 5).all()
        # All is zero that could be added: nothing changes any more.
        halo.accumulate(field.array)
        assert np.array_equal(on_host(field.array), found)


@pytest.mark.parametrize("corners", [False, True], ids=["faces", "corners"])
def test_adjoint(node, route, corners):
    """<H x, y> = <x, H' y>, with H the exchange."""
    for seed in range(some(node, 6)):
        case = random_case(np.random.default_rng([seed, node.size, 23]), node.size)
        case = dataclasses.replace(case, corners=corners)
        mine = np.random.default_rng([seed, node.rank, 29])
        x, y = (mine.integers(-99, 99, case.cells[node.rank].shape).astype("f8") for _ in range(2))
        with exchanging(node, case) as (halo, _):
            forth, back = node.xp.asarray(x.copy()), node.xp.asarray(y.copy())
            halo.exchange(forth)
            halo.accumulate(back)
        sums = (float((on_host(forth) * y).sum()), float((x * on_host(back)).sum()))
        left, right = map(sum, zip(*node.comm.allgather(sums), strict=True))
        assert left == right, (seed, case)


def test_the_same_bits_whoever_comes_first(node, every_route):
    """Numbers whose sums depend on the order."""
    case = even_case((node.size, 1, 1), True, 2, 2, corners=True)
    rng, mine = np.random.default_rng(node.rank), np.random.default_rng([node.rank, 31])
    bits = set()
    with exchanging(node, case, [Kind("f4"), Kind("c8", "F")], [False, True]) as (halo, fields):
        values = []
        for field in fields:
            scales = 10.0 ** rng.integers(-3, 4, field.numbers.shape)
            value = rng.standard_normal(field.numbers.shape) * scales
            values.append(node.xp.asarray(value.astype(field.kind.dtype)))
        for _ in range(30):
            for field, value in zip(fields, values, strict=True):
                field.array[...] = value
            pause(mine, 0.002, 0.3)
            halo.accumulate(*arrays(fields))
            bits.add(b"".join(on_host(field.array).tobytes() for field in fields))
    assert len(bits) == 1


@pytest.mark.parametrize("dtype", ["f8", "c8", "f4"])
def test_all_routes_add_large_and_small_faces_in_one_order(node, monkeypatch, dtype):
    """Faces in many chunks, with edges that belong to several."""
    shape, rng = (6, 30004), np.random.default_rng([node.rank, 41])
    given = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)
    bits = set()
    for route in (None, "copy", "pinned") if node.backend == "cuda" else (None, "mpi"):
        if route is not None:
            monkeypatch.setenv("MPISHARE_ROUTE", route)
        u = node.xp.asarray(given.astype(dtype))
        same = {"periods": True, "corners": True, "node": node}
        with HaloExchange(node.comm, u, 2, dims=(node.size, 1), **same) as halo:
            halo.accumulate(u)
        bits.add(on_host(u).tobytes())
    assert len(bits) == 1


def test_ghosts_may_be_overwritten_right_after(node, route):
    """Steps with random delays: a neighbor must have what was there at the call."""
    case = even_case((node.size, 1), True, 3, 1, corners=True)
    mine = np.random.default_rng([node.rank, 37])
    with exchanging(node, case, [Kind("i8")], True) as (halo, [field]):
        for step in range(60):
            fill(node, case, [field], step)
            pause(mine, 0.002, 0.1)
            halo.accumulate(field.array)
            kept = field.array.copy()
            field.array[...] = -12345
            pause(mine, 0.002, 0.1)
            field.array[...] = kept
            compare(node, case, [field], step)


def test_what_cannot_be_added(host_node, route):
    """Refused; the exchange goes on."""
    case = even_case((host_node.size,), True, 3)
    for dtype in ("?", "f8,i4", "V3", "S7", "M8[us]"):
        with exchanging(host_node, case, [Kind("f8"), Kind(dtype)]) as (halo, fields):
            with pytest.raises((TypeError, UnsupportedError), match="add"):
                halo.accumulate(*arrays(fields))
            exchange_step(halo, fields, 1)

"""Cells that travel in a narrower type: rounded once, bit by bit, on every route."""

import numpy as np
import pytest

from mpishare import Layout, MismatchError, NeighborExchange
from mpishare.plans.wire import off_wire, on_wire
from tests.helpers.halos import exchange_by, on_host
from tests.helpers.rings import beside, ring
from tests.helpers.wires import PAIRS, WIRES, differ, hard, rounded, rows, wrong

TWO = pytest.mark.ranks(min=2)
PAIR = pytest.mark.parametrize(("dtype", "wire"), PAIRS)


@PAIR
def test_numpy_rounds_once(dtype, wire):
    cells = hard(np.random.default_rng(5), 100_000, dtype, wire)
    right = rounded(cells, wire)
    assert differ(off_wire(on_wire(cells, wire), wire, cells.dtype), right) == 0
    if dtype[0] == "f" and wire != "bfloat16":
        with np.errstate(all="ignore"):
            assert differ(cells.astype(wire).astype(dtype), right) == 0


def check_steps(node, u, dtype, wire):
    """By calls and by halves."""
    with ring(node, u, axes=0, wire=wire) as halo:
        for step in range(4):
            of_all = rows(node, u.shape[1], dtype, wire, step)
            u[...] = node.xp.asarray(of_all[node.rank])
            exchange_by(halo, u, halves=step % 2 == 1)
            assert wrong(node, u, of_all, wire) == 0, step


@PAIR
@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("n", [3, 1023, 40_000])
def test_every_ghost_is_rounded_once(node, every_route, dtype, wire, axis, n):
    """Rows are read in place, or reach neighbors by words and by flags."""
    u = node.xp.zeros((4, n) if axis == 0 else (n, 4), dtype)
    check_steps(node, u if axis == 0 else u.T, dtype, wire)


@PAIR
@pytest.mark.parametrize("n", [1, 4097, 600_000])
def test_fields_in_windows(node, dtype, wire, n):
    """Read in place on hosts; on GPUs by words with the epoch, and by chunks into ghosts."""
    n = n if node.backend == "cuda" else min(n, 40_000)  # /dev/shm may be small
    check_steps(node, node.allocate_each((4, n), dtype).array, dtype, wire)


@PAIR
def test_sums_are_of_rounded_ghosts(node, every_route, dtype, wire):
    rng = np.random.default_rng([7, *wire.encode()])
    whole = (rng.random((node.size, 4, 50, 2)) * 2.0**12).astype(f"f{8 if wire[0] == 'f' else 4}")
    whole = (whole[..., 0] + (1j * whole[..., 1] if dtype[0] == "c" else 0)).astype(dtype)
    u = node.xp.asarray(whole[node.rank])
    before, after = beside(node)
    right = whole[node.rank].copy()
    right[1] += rounded(whole[before][3], wire)
    right[2] += rounded(whole[after][0], wire)
    right[[0, 3]] = 0
    with ring(node, u, axes=0, wire=wire) as halo:
        halo.accumulate(u)
        found = on_host(u)
        assert differ(found, right) == 0


@pytest.mark.parametrize("wire", WIRES)
def test_places_of_a_mesh(node, every_route, wire):
    """A place may be sent twice; sums of several ghosts of one cell stay in order."""
    before, after = beside(node)
    ids = np.array([3, 4, 5]) + 3 * node.rank
    ghosts = [3 + 3 * after, 3 + 3 * after, 5 + 3 * before]
    u = node.xp.zeros((6, 2))
    all_ids = np.concatenate([ids, ghosts])
    made = NeighborExchange.from_global_ids(node.comm, all_ids, 3, u, node=node, wire=wire)
    with made as halo:
        u[...] = node.xp.asarray(np.pi * all_ids[:, None] + [0, 1 / 3])
        halo.exchange(u)
        right = np.pi * all_ids[:, None] + [0, 1 / 3]
        right[3:] = rounded(right[3:], wire)
        found = on_host(u)
        assert differ(found, right) == 0
        halo.accumulate(u)
        found = on_host(u)
        right[0] = right[0] + rounded(right[0], wire) + rounded(right[0], wire)
        right[2] += rounded(right[2], wire)
        right[3:] = 0
        assert differ(found, right) == 0


def test_any_fields(node):
    with ring(node, Layout.any(6), wire="float16") as halo:
        for dtype in ("f8", "f4", "c16"):
            u = node.xp.full(6, node.rank + 1 / 3, dtype)
            halo.exchange(u)
            ghost = rounded(np.array([beside(node)[0] + 1 / 3], dtype), "float16")[0]
            assert u[0] == ghost
            assert "wire=float16" in repr(halo)
        for dtype, kind, words in (
            ("i4", TypeError, "real or"),
            ("f2", ValueError, "wider numbers"),
        ):
            with pytest.raises(kind, match=words):
                halo.exchange(node.xp.zeros(6, dtype))
        halo.exchange(u)


REFUSED = [
    ("f8", "float64", ValueError, "wire must be one of ('float32', 'float16', 'bfloat16'), or"),
    ("f8", ["float32"], ValueError, "or None, not ['float32']"),
    ("f4", "float32", ValueError, "field 0 is of float32, and wire='float32' is for wider numbers"),
    ("f2", "bfloat16", ValueError, "wire='bfloat16' is for wider numbers"),
    ("c8", "float32", ValueError, "is for wider numbers: make a plan without wire="),
    ("i8", "float32", TypeError, "field 0 is of int64, and wire='float32' is for real or complex"),
    ("?", "float16", TypeError, "field 0 is of bool"),
]


@pytest.mark.parametrize(("dtype", "wire", "kind", "words"), REFUSED)
def test_what_cannot_be_rounded(node, dtype, wire, kind, words):
    with pytest.raises(kind) as caught:
        ring(node, node.xp.zeros(6, dtype), wire=wire)
    assert words in str(caught.value)


def test_in_the_byte_order_of_others(host_node):
    with pytest.raises(TypeError, match=r"is for real or.*newbyteorder"):
        ring(host_node, np.zeros(6, ">f8"), wire="float32")


@TWO
def test_ranks_name_one_wire(node):
    with pytest.raises(MismatchError) as caught:
        ring(node, node.xp.zeros(6), wire=[None, "float32"][node.rank % 2])
    assert "wire=None" in str(caught.value)
    assert "wire='float32'" in str(caught.value)
    with ring(node, node.xp.zeros(6)) as halo:
        assert "wire" not in repr(halo)

"""Cells that travel in a narrower type on GPUs: large faces, graphs, windows, pretended nodes."""

import numpy as np
import pytest

from mpishare import UnsupportedError
from tests.helpers.captures import captured, skip_without_graphs
from tests.helpers.halos import exchange_by, ring
from tests.helpers.halves import WORLD, node_of_half, require_nccl
from tests.helpers.wires import WIRES, differ, rounded, rows, wrong

TWO = pytest.mark.ranks(min=2)


def put(node, u, dtype, wire, step):
    """Fill the block with the numbers of that step; return those of all ranks."""
    of_all = rows(node, u.shape[1], dtype, wire, step)
    u[...] = node.xp.asarray(of_all[node.rank])
    return of_all


def test_small_and_large_fields_of_two_dtypes_in_one_plan(node):
    """And of every way that cells lie: rows, columns, planes of three axes."""
    xp = node.xp
    u, v, w = xp.zeros((4, 300_000)), xp.zeros((5, 4), "f4").T, xp.zeros((4, 30, 70)).T.T
    cells = (w, w[:, ::2, ::3], w.transpose(0, 2, 1))
    for of_w in cells:
        with ring(node, (u, v, of_w), axes=0, wire="bfloat16") as halo:
            for step in range(3):
                right = [put(node, u, "f8", "bfloat16", step), put(node, v, "f4", "bfloat16", step)]
                flat = rows(node, of_w[0].size, "f8", "bfloat16", 9 + step)
                of_w[...] = xp.asarray(flat[node.rank].reshape(of_w.shape))
                halo.exchange(u, v, of_w)
                assert wrong(node, u, right[0], "bfloat16") == 0
                assert wrong(node, v, right[1], "bfloat16") == 0
                assert wrong(node, of_w.copy().reshape(4, -1), flat, "bfloat16") == 0


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("n", [100, 300_000])
def test_captured_and_replayed(node, stream_route, stream, wire, n):
    """What is captured in one piece and in halves, by every route that a graph may have."""
    u = node.xp.zeros((4, n))
    with ring(node, u, axes=0, wire=wire) as halo:
        skip_without_graphs(halo)
        halo.exchange(u)
        graphs = []
        with captured(stream, graphs):
            halo.exchange(u)
            halo.start(u)
            halo.wait()
        for step in range(4):
            of_all = put(node, u, "f8", wire, step)
            graphs[0].launch(stream)
            node.synchronize(stream)
            assert wrong(node, u, of_all, wire) == 0, step


def test_numbers_that_are_not_aligned(node):
    """Their bytes cannot be read as numbers: refused on all ranks, and the node lives on."""
    memory = node.xp.zeros(4 * 12 + 8, "u1")
    u = node.xp.ndarray((4,), "f8", memory.data, strides=(12,))
    with pytest.raises(UnsupportedError, match="not aligned to its elements"):
        ring(node, u, wire="float32")
    ring(node, node.xp.zeros(6), wire="float32").close()


@pytest.fixture(scope="module")
def half():
    """The node of one half of the ranks, which take the other half for another machine."""
    import cupy

    with node_of_half(WORLD.rank % cupy.cuda.runtime.getDeviceCount()) as node:
        yield node


@TWO
@pytest.mark.parametrize("dtype", ["f8", "c16"])
@pytest.mark.parametrize("wire", WIRES)
def test_between_nodes(half, route, dtype, wire):
    """By NCCL, or by MPI; forth, in halves, and back."""
    import cupy

    if not route:
        require_nccl()

    def put(step):
        of_all = rows(WORLD, n, dtype, wire, step)
        u[...] = cupy.asarray(of_all[WORLD.rank])
        return of_all

    for n in (5, 30_000):
        u = cupy.zeros((4, n), dtype)
        with ring(half, u, comm=WORLD, axes=0, wire=wire) as halo:
            others = {found for rank, found in halo.routes.items() if rank not in half.ranks}
            assert others == ({"nccl"} if not route else others & {"mpi", "mpi-gpu"})
            for step in range(3):
                of_all = put(step)
                exchange_by(halo, u, halves=step == 1)
                assert wrong(WORLD, u, of_all, wire) == 0
            u[...] = WORLD.rank + 1 / 3
            halo.accumulate(u)
            found = u.get()
            for row, step in ((1, -1), (2, 1)):
                ghost = np.full(n, (WORLD.rank + step) % WORLD.size + 1 / 3, dtype)
                assert differ(found[row], WORLD.rank + 1 / 3 + rounded(ghost, wire)) == 0
            assert not found[[0, 3]].any()

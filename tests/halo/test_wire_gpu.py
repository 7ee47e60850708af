"""Cells that travel in a narrower type on GPUs: large faces, graphs, windows, pretended nodes."""

import pytest

from mpishare import UnsupportedError
from tests.helpers.captures import captured, skip_without_graphs
from tests.helpers.rings import ring
from tests.helpers.wires import WIRES, rows, wrong

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

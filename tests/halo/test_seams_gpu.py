"""Seams on GPUs: captured, with shifts that are in GPU memory, turned in tiles, large and small."""

import numpy as np
import pytest

from mpishare import Seam, SeamExchange
from tests.helpers.captures import captured, skip_without_graphs
from tests.helpers.halos import on_host
from tests.helpers.seams import expected

LENGTH = 12


def rings(node, width=4):
    """Each rank reads a part of a ring of all ranks, from a place that is its own."""
    pieces = [(rank, 0, np.s_[width:, :]) for rank in range(node.size)]
    into = (0, np.s_[:width, :])
    return [Seam(into, pieces, along=0, start=5 * node.rank, shift="n", flip=(0,), scale=-2.0)]


@pytest.mark.parametrize("columns", [3, 5000], ids=["small", "large"])
@pytest.mark.parametrize("kind", ["i4", "i8"])
def test_a_captured_step_follows_a_shift_in_gpu_memory(
    node, stream, cupy, stream_route, kind, columns
):
    u = cupy.asarray(np.random.default_rng(node.rank).random((LENGTH + 4, columns)))
    shift, seams = cupy.zeros((), kind), rings(node)
    with SeamExchange(node.comm, u, seams, node=node) as plan:
        skip_without_graphs(plan)
        plan.exchange(u, shift={"n": shift})
        graphs = []
        with captured(stream, graphs):
            plan.exchange(u, shift={"n": shift})
        for n in (0, 3, -7, LENGTH * node.size + 1):
            u[4:] += 1
            shift[...] = n
            right = expected(node.comm, [on_host(u)], seams, {"n": n})
            graphs[0].launch(stream)
            assert (on_host(u) == right[0]).all()
        with captured(stream, graphs):  # an int as it is
            plan.exchange(u, shift={"n": 2})
        right = expected(node.comm, [on_host(u)], seams, {"n": 2})
        plan.exchange(u, shift={"n": 3})
        graphs[1].launch(stream)
        assert (on_host(u) == right[0]).all()


def test_a_shift_is_one_int(node, cupy):
    u = cupy.zeros((LENGTH + 4, 3))
    with SeamExchange(node.comm, u, rings(node), node=node) as plan:
        for wrong in (cupy.zeros(2, "i8"), cupy.zeros(()), cupy.zeros((), "i2")):
            with pytest.raises(TypeError, match=r"shift\['n'\] must be one int32 or int64"):
                plan.exchange(u, shift={"n": wrong})
        plan.exchange(u, shift={"n": cupy.ones((), "i4")})


@pytest.mark.parametrize("dtype", ["f4", "f8", "c16", "i2"])
@pytest.mark.parametrize("flip", [(), (0,), (1,), (0, 1)])
def test_faces_are_transposed_and_reversed(node, every_route, dtype, flip):
    """From other ranks, and from a field of the rank's own."""
    rng = np.random.default_rng(node.rank)
    u, v = (node.xp.asarray(rng.integers(0, 99, (400, 400)).astype(dtype)) for _ in range(2))
    peer, half = (node.rank + 1) % node.size, np.s_[:200, :]
    rest = {"axes": (1, 0), "flip": flip, "scale": -1}
    seams = [
        Seam((0, half), (peer, 1, np.s_[:, 200:]), **rest),
        Seam((1, np.s_[:, :200]), (node.rank, 0, np.s_[200:, :]), **rest),
    ]
    with SeamExchange(node.comm, [u, v], seams, node=node) as plan:
        for _ in range(3):
            right = expected(node.comm, [on_host(u), on_host(v)], seams)
            plan.exchange(u, v)
            assert (on_host(u) == right[0]).all()
            assert (on_host(v) == right[1]).all()

"""Sums that are given back in GPU memory: replayed as one graph, in captures, on two streams."""

import numpy as np
import pytest

import mpishare
from tests.helpers.captures import captured, skip_without_graphs
from tests.helpers.halos import on_host
from tests.helpers.rings import ring


def both_calls(halo, u):
    halo.accumulate(u)
    halo.exchange(u)


@pytest.mark.parametrize("count", [1, 3000, 100_000])
def test_replays_have_the_bits_of_two_calls(node, stream_route, count):
    """Of one array and of many in turn, plainly, as graphs, replayed."""
    rng = np.random.default_rng(node.rank)
    values = [rng.standard_normal((6, count)) for _ in range(3)]
    fields = [node.xp.asarray(each) for each in values]
    with ring(node, fields[0], axes=0) as halo:
        for field, each in zip(fields, values, strict=True):
            right = node.xp.asarray(each)
            for step in range(5):
                both_calls(halo, right)
                halo.accumulate(field, give_back=True)
                assert (on_host(field) == on_host(right)).all(), step
                if step == 2:  # on another stream
                    with node.xp.cuda.Stream(non_blocking=True) as other:
                        both_calls(halo, right)
                        halo.accumulate(field, give_back=True)
                    node.synchronize(other)


@pytest.mark.parametrize("dtype", ["f8", "f4", "i1"])
@pytest.mark.parametrize("corners", [False, True])
def test_any_number_of_copies_in_one_kernel(node, corners, dtype):
    """Of faces, edges and corners, its own ghosts among them: in the order of the two calls."""
    dims, shape = (node.size, 1, 1), (5, 6, 200)
    rng = np.random.default_rng([node.rank, 61])
    values = (50 * rng.standard_normal(shape)).astype(dtype)
    u, right = (node.xp.asarray(values) for _ in range(2))
    given = {"dims": dims, "axes": (0, 1, 2), "periods": True, "corners": corners, "node": node}
    with mpishare.HaloExchange(node.comm, u, 1, **given) as halo:
        for _ in range(4):
            halo.accumulate(u, give_back=True)
        has_reverse = halo._fields.reverse is not None
        for _ in range(4):
            both_calls(halo, right)
        node.synchronize()
        assert on_host(u).tobytes() == on_host(right).tobytes()
        assert has_reverse == ("fused" not in halo.routes.values())


def test_in_a_graph(node, stream, stream_route):
    """A plan beside it, which uses the GPU between its two kernels."""
    values = np.random.default_rng(node.rank).standard_normal((6, 50))
    u, v, right = (node.xp.asarray(values) for _ in range(3))
    with ring(node, u, axes=0) as halo, ring(node, v, axes=0) as other:
        skip_without_graphs(halo)
        halo.accumulate(u, give_back=True)
        both_calls(halo, right)
        node.synchronize()
        graphs = []
        with captured(stream, graphs):
            halo.accumulate(u, give_back=True)
            other.exchange(v)
        for _ in range(5):
            graphs[0].launch(stream)
            both_calls(halo, right)
        node.synchronize()
        assert (on_host(u) == on_host(right)).all()
        graphs.clear()

"""Plans for any fields on GPUs: the fast path, streams, graphs, tensors, and what is refused."""

import numpy as np
import pytest

from mpishare import Layout, UnsupportedError
from tests.helpers.captures import refuse_full_checks, skip_without_graphs
from tests.helpers.halos import exchange_by
from tests.helpers.latch import Latch
from tests.helpers.rings import beside, ring

CELLS = 6


@pytest.fixture
def halo(node):
    return ring(node, Layout(CELLS, None))


def fill(u, node, step):
    u.fill(-1)
    u[1:-1] = 10 * step + node.rank


def check(u, node, step):
    left, right = beside(node)
    found = u.get().reshape(CELLS, -1)
    assert (found[0] == 10 * step + left).all()
    assert (found[-1] == 10 * step + right).all()


def test_seen_fields_take_the_fast_path(node, halo, stream):
    """In turns, one graph launch each, as those of a plan for them alone; also between calls."""
    fields = [
        node.xp.zeros((CELLS, *others), dtype)
        for dtype, others in (("f8", ()), ("i4", ()), ("f4", (3,)))
    ]
    combinations = [*([each] for each in fields), fields]
    for step in range(1, 20):
        for given in combinations:
            if step == 12 and not {"pinned", "mpi", "copy"} & set(halo.routes.values()):
                refuse_full_checks(halo)
            for u in given:
                fill(u, node, step)
            # An exchange after a start, which was on another stream, is put in order first.
            exchange_by(halo, *given, halves=step < 10 and step % 2 == 0)
            node.synchronize()
            for u in given:
                check(u, node, step)


def test_combinations_of_one_plan_are_in_order_on_any_streams(node, halo):
    """The same memory as float64 and as int64: what comes later sees what came before."""
    first, second = (node.xp.cuda.Stream(non_blocking=True) for _ in range(2))
    u = node.xp.zeros(CELLS)
    v = u.view("i8")
    for given in (u, v):
        halo.exchange(given)
    v[1:-1] = 7  # a kernel that is loaded behind the latch would wait for it
    node.synchronize()
    with Latch() as latch:
        latch.hold(first.ptr)
        with first:
            v[1:-1] = 1 + node.rank
            halo.exchange(u)
        with second:
            halo.exchange(v)
        assert not second.done
        latch.release()
        node.synchronize(second)
    node.synchronize(first)
    left, right = beside(node)
    assert v.get().tolist() == [1 + left, *[1 + node.rank] * 4, 1 + right]


def test_a_first_sight_is_not_captured(node, halo, stream):
    """It is refused by name on all ranks; the capture and the plan go on, with what was seen."""
    skip_without_graphs(halo)
    u, v = node.xp.zeros(CELLS), node.xp.zeros(CELLS, "f4")
    halo.exchange(u)
    halo.exchange(u)
    stream.begin_capture()
    for call in (halo.exchange, halo.start, halo.accumulate):
        with pytest.raises(UnsupportedError, match=r"not seen these fields before.*capture"):
            call(v)
    halo.exchange(u)
    graph = stream.end_capture()
    for step in range(5):
        fill(u, node, step)
        graph.launch(stream)
        node.synchronize(stream)
        check(u, node, step)
        fill(v, node, step)
        halo.exchange(v)
        node.synchronize(stream)
        check(v, node, step)
    del graph


def test_fields_in_host_memory(node, halo):
    """They are of another backend: refused on all ranks, also when ones alike were seen."""
    for _ in range(2):
        with pytest.raises(TypeError, match="not an array in GPU memory"):
            halo.exchange(np.zeros(CELLS))
        halo.exchange(node.xp.zeros(CELLS))


def test_tensors(node, halo):
    torch = pytest.importorskip("torch")
    for dtype in (torch.float64, torch.bfloat16, torch.float64):
        u = torch.full((CELLS, 2), node.rank, dtype=dtype, device="cuda")
        halo.exchange(u)
        left, right = beside(node)
        assert u[:, 0].tolist() == [left, *[node.rank] * 4, right]

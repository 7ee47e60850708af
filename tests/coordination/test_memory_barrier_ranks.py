"""The memory barriers of processors that reorder, used on this one."""

import pytest

import mpishare
from mpishare import native


@pytest.mark.parametrize("way", ["compiled", "locks"])
def test_the_real_barrier_orders(comm, monkeypatch, way):
    monkeypatch.setattr(native, "_ORDERED_MACHINES", ())
    if way == "locks":
        monkeypatch.setattr(native, "load", lambda: (None, "to try locks"))
    with mpishare.Node(comm) as node:
        assert node._context.memory_barrier is not int
        window = node.allocate_each(1, "i8", fill=-1)
        for step in range(50):
            window.array[...] = step + node.rank
            window.fence()
            seen = [int(window.segment(rank)[0]) for rank in range(node.size)]
            assert seen == [step + rank for rank in range(node.size)]
            window.fence()
        node.synchronize()

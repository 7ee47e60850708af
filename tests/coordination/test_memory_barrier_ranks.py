"""The memory barrier of processors that reorder, used on this one."""

import mpishare
from mpishare.coordination import control_block


def test_the_real_barrier_orders_and_is_freed(comm, monkeypatch):
    monkeypatch.setattr(control_block, "ORDERED_MACHINES", ())
    with mpishare.Node(comm) as node:
        window = node.allocate_each(1, "i8", fill=-1)
        for step in range(50):
            window.array[...] = step + node.rank
            window.fence()
            seen = [int(window.segment(rank)[0]) for rank in range(node.size)]
            assert seen == [step + rank for rank in range(node.size)]
            window.fence()
        node.synchronize()

"""The memory barrier of processors that reorder, used on this one."""

from mpi4py import MPI

import mpishare
from mpishare.coordination import control_block


def test_the_real_barrier_orders_and_is_freed(comm, monkeypatch):
    monkeypatch.setattr(control_block, "ORDERED_MACHINES", ())
    with mpishare.Node(comm) as node:
        block = node._context.agreement.block
        assert block.sync == block.barrier._window.Sync
        window = node.allocate_each(1, "i8", fill=-1)
        for step in range(50):
            window.array[...] = step + node.rank
            window.fence()
            seen = [int(window.segment(rank)[0]) for rank in range(node.size)]
            assert seen == [step + rank for rank in range(node.size)]
            window.fence()
        node.synchronize()
    assert block.barrier._window is None


def test_ordered_processors_need_none(comm, monkeypatch):
    monkeypatch.setattr(control_block, "ORDERED_MACHINES", (control_block.platform.machine(),))
    with mpishare.Node(comm) as node:
        assert node._context.agreement.block.barrier._window is None
        assert node.comm.allreduce(1, MPI.SUM) == node.size

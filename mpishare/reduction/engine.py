"""What an `Allreduce` asks of an engine, which reduces over the ranks of one node.

There is one engine for fields in host memory (`mpishare.reduction.host`), one for fields in GPU
memory (`mpishare.reduction.cuda`). What goes from node to node stands above them
(`mpishare.reduction.across_nodes`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from mpishare.halo import gpu_memory
from mpishare.halo.engine import PlanEngine
from mpishare.reduction.across_nodes import HostTransfer
from mpishare.reduction.order import packing_order

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.halo.engine import PlanSetup
    from mpishare.halo.layout import FieldLayout
    from mpishare.reduction.across_nodes import Transfer
    from mpishare.reduction.operation import Operation


class ReduceEngine(PlanEngine, Protocol):
    """Reduces fields over the ranks of one node, in the order of their ranks in the plan.

    Making one is collective over the plan and host-blocking: each step that may fail on one rank is
    agreed on by ``setup.comm.step``. ``setup.comm.ranks_here`` maps the plan's ranks that are here,
    in ascending order, to their ranks in the node; there may be only one. ``setup.mine[0]`` is the
    layout; only the strides may differ from rank to rank (``setup.layouts``).

    The plan has seen, before it calls, that it is open, and that the node is not broken (which also
    refuses other threads). `reduce` and `dot` check their arrays and raise `TypeError` or
    `ValueError`, without the name of the plan and the call, before they touch or signal anything.

    Attributes
    ----------
    maps_gpu_memory : bool
        Whether the ranks of the node may map memory of each other's GPUs.
    try_fast : callable or None
        Given the field and the stream: does what `reduce` does where it is sure that it may, also
        that the plan is open and the node not broken; else returns False with nothing done.
    """

    maps_gpu_memory: bool
    try_fast: Callable[[Any, Any], bool] | None

    def reduce(self, field: Any, stream: Any) -> None:
        """Put the node's result into `field` on every rank.

        Collective over the node's ranks; stream-ordered on CUDA, host-blocking else.

        Parameters
        ----------
        field : array
            Of the plan's layout.
        stream : stream or None
            None: the current one of the library that the field comes from.
        """
        ...

    def dot(self, x: Any, y: Any, out: Any, stream: Any) -> Any:
        """Put the sum of ``conj(x) * y`` over the node's ranks into `out`, and return that.

        As `reduce`; only where the operation is ``"sum"``.

        Parameters
        ----------
        x, y : array
            Of the operation's dtype, any strides a plan takes, and the same shape as each other,
            which may be another than that of the layout and differ from rank to rank; an empty one
            adds nothing.
        out : array of one element, or None
            Of the operation's dtype. None: a new one of shape (), where x is.
        """
        ...

    def is_captured(self, fields: Sequence[Any], stream: Any) -> bool:
        """Whether the stream of a call is being captured into a graph."""
        ...


def engine_class(setup: PlanSetup) -> Callable[[PlanSetup, FieldLayout, Operation], ReduceEngine]:
    """Import the engine for the backend of the fields. Local."""
    if setup.on_gpu:
        from mpishare.reduction.cuda.engine import CudaReduce

        return CudaReduce
    from mpishare.reduction.host import HostReduce

    return HostReduce


def make_engine(setup: PlanSetup, layout: FieldLayout, operation: Operation) -> ReduceEngine:
    """Make the engine that reduces over the ranks of this node. Collective, host-blocking.

    Parameters
    ----------
    setup : PlanSetup
        What the ranks of the plan agreed on.
    layout : FieldLayout
        That of this rank's field.
    operation : Operation
        The same on all ranks.
    """
    return engine_class(setup)(setup, layout, operation)


def make_transfer(
    setup: PlanSetup, engine: ReduceEngine, operation: Operation, count: int
) -> Transfer:
    """Make what copies and combines packed fields, for `AcrossNodes`. Collective.

    In GPU memory, if so many elements are worth it, the MPI takes that, and the ranks of every node
    can map it; else in host memory.
    """
    order = packing_order(setup)
    if not setup.on_gpu:
        return HostTransfer(operation, order)
    from mpishare.reduction.cuda import transfer

    is_large = count * operation.dtype.itemsize >= transfer.MIN_ON_GPU_NBYTES
    if is_large and gpu_memory.serves_reductions(setup, can_map=engine.maps_gpu_memory):
        return transfer.GpuTransfer(setup, operation, order)
    return transfer.CudaTransfer(setup, operation, order)

"""The interface between an `Allreduce` and the engine that reduces over the ranks of one node.

Fields in host memory are reduced by `mpishare.reduction.host`, fields in GPU memory by
`mpishare.reduction.cuda`; messages between nodes stand above them
(`mpishare.reduction.across_nodes`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from mpishare.plans.engine import PlanEngine
from mpishare.reduction.across_nodes import Transfer

if TYPE_CHECKING:
    from mpishare.plans.engine import PlanSetup
    from mpishare.plans.layout import FieldLayout
    from mpishare.reduction.exact import ExactOperation
    from mpishare.reduction.operation import Operation


class ReduceEngine(PlanEngine, Protocol):
    """Reduces fields over the ranks of one node, in the order of their ranks in the plan.

    Making one is collective over the plan and host-blocking: each step that may fail on one rank is
    agreed on by ``setup.comm.step``. ``setup.comm.ranks_here`` maps the plan's ranks on this node,
    in ascending order, to their ranks in the node; there may be only one. ``setup.mine[0]`` is the
    layout; only the strides may differ from rank to rank (``setup.layouts``). With an exact
    operation `dot` makes words, which `combine_words` combines where it is set, and rounds them.

    The plan has checked, before each call, that it is open, and that the node is not broken (which
    also refuses other threads). `reduce` and `dot` check their arrays and raise `TypeError` or
    `ValueError`, without the name of the plan and the call, before they touch or signal anything.

    `try_fast` replaces plan and `reduce` where it can be sure of all these checks; else it returns
    False with nothing done.
    """

    reaches_nodes: bool  # it reduces over those of all nodes
    combine_words: Callable[[Any, Any], None] | None  # over nodes, before they are rounded
    try_fast: Callable[[Any, Any], bool] | None

    def reduce(self, field: Any, stream: Any) -> None:
        """Put the node's result into `field` on every rank.

        Collective over the node's ranks; stream-ordered on CUDA, else host-blocking.
        """
        ...

    def dot(self, x: Any, y: Any, out: Any, stream: Any) -> Any:
        """Put the sum of ``conj(x) * y`` over the node's ranks into `out`, and return that.

        As `reduce`; only for the operation ``"sum"``. x and y have its dtype and one shape, which
        may differ from the layout's and from rank to rank; empty ones add nothing. Without `out`
        the result is a new array of shape (), in the memory of x.
        """
        ...


Make = Callable[["PlanSetup", "FieldLayout", "Operation", "ExactOperation | None"], ReduceEngine]


def engine_class(setup: PlanSetup) -> Make:
    """Import the engine for the backend of the fields."""
    if setup.on_gpu:
        from mpishare.reduction.cuda.engine import CudaReduce

        return CudaReduce
    from mpishare.reduction.host import HostReduce

    return HostReduce


def transfer_class(setup: PlanSetup) -> Callable[[PlanSetup], Transfer]:
    """Import the copies between the fields and packed host memory, for messages between nodes."""
    if setup.on_gpu:
        from mpishare.reduction.cuda.transfer import CudaTransfer

        return CudaTransfer
    return Transfer

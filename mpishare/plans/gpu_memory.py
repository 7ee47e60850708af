"""The agreement on whether a plan's MPI messages go out of GPU memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishare.errors import UnsupportedError
from mpishare.plans.routes import log
from mpishare.runtime.gpu_messages import why_not
from mpishare.runtime.route import GPU_MESSAGES, MPI_HOST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.plans.engine import PlanSetup


def ask(setup: PlanSetup) -> str:
    """Return why messages of this rank cannot go out of GPU memory; empty if they can."""
    return why_not() or "" if setup.on_gpu else ""


def settle(setup: PlanSetup, answers: Sequence[str], *, has_messages: bool) -> bool:
    """Whether they do, given the answers of all ranks to `ask`; where there are none, they do not.

    All ranks log nothing but the first, which does so once a node.
    """
    name, context = setup.same["MPISHARE_ROUTE"], setup.context
    if not (setup.on_gpu and has_messages) or name == MPI_HOST:
        return False
    why = next(filter(None, answers), "")
    if why and name == GPU_MESSAGES:
        raise UnsupportedError(
            f"MPISHARE_ROUTE=mpi-gpu: messages go through host memory: {why}. Use an MPI that "
            "takes such pointers, or leave MPISHARE_ROUTE out."
        )
    if context.gpu_messages is None and not setup.comm.rank:
        tell, how = (log.warning, f"through host memory: {why}") if why else (log.info, _OUT)
        tell("%s: messages between nodes go %s", setup.name, how)
    context.gpu_messages = why
    return not why


_OUT = "out of GPU memory, which the MPI takes"

"""The agreement on whether a plan's MPI messages go out of GPU memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishare.errors import UnsupportedError
from mpishare.plans.routes import log
from mpishare.runtime.gpu_messages import why_not
from mpishare.runtime.route import GPU_MESSAGES, MESSAGES, MPI_HOST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.plans.comm import PlanComm
    from mpishare.plans.engine import PlanSetup


def ask(setup: PlanSetup) -> str | None:
    """Return why messages cannot go out of GPU memory, or ``""``; None if another rank checks."""
    if not setup.on_gpu or not asks(setup.comm, setup.same["MPISHARE_ROUTE"]):
        return None
    if setup.context.gpu_messages is None:
        return why_not() or ""
    return setup.context.gpu_messages


def asks(comm: PlanComm, name: str | None) -> bool:
    """Whether this rank checks it: the first of the plan on each node, if there may be messages."""
    has_messages = name in (MESSAGES, GPU_MESSAGES) or not comm.is_of_one_node
    return has_messages and name != MPI_HOST and comm.rank == next(iter(comm.ranks_here))


def settle(setup: PlanSetup, answers: Sequence[str | None]) -> str | None:
    """Keep and return the agreed answer."""
    answer = answer_of(answers, setup.same["MPISHARE_ROUTE"])
    if answer is not None:
        if setup.context.gpu_messages is None:
            log_memory(setup.name, setup.comm, answer)
        setup.context.gpu_messages = answer
    return answer


def answer_of(answers: Sequence[str | None], name: str | None) -> str | None:
    """Return the answer of the whole plan to `ask`."""
    known = [answer for answer in answers if answer is not None]
    if not known or name == MPI_HOST:
        return None
    why = next(filter(None, known), "")
    if why and name == GPU_MESSAGES:
        raise UnsupportedError(
            f"MPISHARE_ROUTE=mpi-gpu: messages go through host memory: {why}. Use an MPI that "
            "takes such pointers, or leave MPISHARE_ROUTE out."
        )
    return why


def log_memory(name: str, comm: PlanComm, why: str) -> None:
    """Log on one rank of the plan which memory messages of fields on GPUs use."""
    if comm.rank:
        return
    if why:
        log.warning("%s: messages between nodes go through host memory: %s", name, why)
    else:
        log.info("%s: messages between nodes go out of GPU memory, which the MPI takes", name)


def serves_reductions(setup: PlanSetup, *, can_map: bool) -> bool:
    """Whether messages of a reduction go out of GPU memory, the same on all ranks. Collective.

    This also takes peer mappings of GPU memory within the node: `can_map`.
    """
    call = setup.call
    replies = setup.comm.step(call, lambda: [can_map, ask(setup) if can_map else None])
    if not all(can_map for can_map, _ in replies):
        return False
    return settle(setup, [answer for _, answer in replies]) == ""

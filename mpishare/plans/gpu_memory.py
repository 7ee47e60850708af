"""The agreement on whether a plan's MPI messages go out of GPU memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.plans import routes
from mpishare.runtime.gpu_messages import why_not

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.plans.engine import PlanSetup


def ask(setup: PlanSetup) -> str | None:
    """Return why messages cannot go out of GPU memory, or ``""``; None if another rank checks."""
    if not setup.on_gpu or not routes.asks_for_gpu_memory(setup.comm, setup.same["MPISHARE_ROUTE"]):
        return None
    if setup.context.gpu_messages is None:
        device: Any = setup.node.device
        # Half of the deadline, with which the other ranks wait meanwhile.
        return why_not(device.ordinal, setup.context.agreement.timeout_s / 2) or ""
    return setup.context.gpu_messages


def settle(setup: PlanSetup, answers: Sequence[str | None]) -> str | None:
    """Keep and return the agreed answer."""
    answer = routes.answer_of(answers, setup.same["MPISHARE_ROUTE"])
    if answer is not None:
        if setup.context.gpu_messages is None:
            routes.log_memory(setup.name, setup.comm, answer)
        setup.context.gpu_messages = answer
    return answer


def serves_reductions(setup: PlanSetup, *, can_map: bool) -> bool:
    """Whether messages of a reduction go out of GPU memory, the same on all ranks. Collective.

    This also takes peer mappings of GPU memory within the node: `can_map`.
    """
    call = setup.call
    replies = setup.comm.step(call, lambda: [can_map, ask(setup) if can_map else None])
    if not all(can_map for can_map, _ in replies):
        return False
    return settle(setup, [answer for _, answer in replies]) == ""

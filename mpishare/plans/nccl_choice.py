"""The agreement on whether NCCL takes the cells of GPUs to other nodes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mpishare.errors import UnsupportedError, warn_once
from mpishare.plans.routes import log
from mpishare.runtime.route import MPI_HOST, NCCL, ROUTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.plans.engine import PlanSetup

    Reply = list[str] | None
    """The GPU, the host name for NCCL, why it does not load; None: it is not considered."""


def ask(setup: PlanSetup) -> Reply:
    """Return this rank's part of the choice."""
    name = setup.same["MPISHARE_ROUTE"]
    is_refused = name == MPI_HOST or (name is not None and ROUTES[name].is_of_mpi)
    require = setup.same["require"]
    is_refused |= require is not None and NCCL not in require
    if not setup.on_gpu or is_refused or (setup.comm.is_of_one_node and name != NCCL):
        return None
    from mpishare.backends import nccl

    context, why = setup.context, ""
    try:
        nccl.load()
    except UnsupportedError as error:
        why = str(error)
    # By the name that the site gives this host NCCL tells GPUs of several hosts apart.
    return [context.uuids[context.rank], os.environ.get("NCCL_HOSTID", ""), why]


def settle(setup: PlanSetup, replies: Sequence[Reply]) -> bool:
    """Whether NCCL takes them, the same on all ranks; raises where it is forced and cannot."""
    given = [reply for reply in replies if reply is not None]
    if not given:
        return False
    why = next((why for *_, why in given if why), "")
    gpus = [(uuid, host) for uuid, host, _ in given]
    if not why and len({*gpus}) < len(gpus):
        why = "ranks share a GPU, and NCCL wants one for each"
    if why and setup.same["MPISHARE_ROUTE"] == NCCL:
        raise UnsupportedError(f"MPISHARE_ROUTE=nccl: {why}. Leave MPISHARE_ROUTE out")
    if why and not setup.comm.rank:
        warn_once(log, "messages between nodes are of MPI, not of NCCL: %s", why)
    return not why

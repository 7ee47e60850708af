"""Agreement by messages: across nodes, and before a node has its control block."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

from mpishare.errors import PeerTimeout

if TYPE_CHECKING:
    from mpi4py import MPI


def gather(comm: MPI.Intracomm, call: str, value: Any, timeout_s: float) -> list[Any]:
    """Learn every rank's value by messages, with a deadline.

    Collective over `comm`, host-blocking.

    Raises
    ------
    PeerTimeout
        If it is not complete in time. Which ranks are missing cannot be known.
    """
    import numpy as np

    data = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
    counts = np.empty(comm.size, dtype=np.int64)
    mine = np.array([data.size], dtype=np.int64)
    finish(comm.Iallgather(mine, counts), call, timeout_s)
    whole = np.empty(int(counts.sum()), dtype=np.uint8)
    # Not Iallgatherv on exact counts alone: displacements beyond an int are refused by MPI anyway.
    finish(comm.Iallgatherv(data, [whole, counts]), call, timeout_s)
    ends = np.cumsum(counts)
    return [
        json.loads(whole[end - count : end].tobytes())
        for end, count in zip(ends, counts, strict=True)
    ]


def finish(request: MPI.Request, call: str, timeout_s: float) -> None:
    """Wait for a request with a deadline. A collective that is late cannot be cancelled."""
    deadline = time.monotonic() + timeout_s
    while not request.Test():
        os.sched_yield()
        if time.monotonic() > deadline:
            raise PeerTimeout(
                f"{call} failed: not every rank of the communicator arrived within "
                f"{timeout_s:g} s. All of its ranks must call it.",
                ranks=(),
                timeout_s=timeout_s,
            )

"""Agreement by messages: across nodes, and before a node has its control block."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

from mpishare.errors import PeerError, PeerTimeout, peer_error, words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

    Check = Callable[[], None] | None


def gather(
    comm: MPI.Comm, call: str, value: Any, timeout_s: float, check: Check = None
) -> list[Any]:
    """Learn every rank's value by messages, with a deadline.

    Collective over `comm`, host-blocking.

    Parameters
    ----------
    check : callable, optional
        Called while it waits; raises where there is no point in waiting on.

    Raises
    ------
    PeerTimeout
        If it is not complete in time. Which ranks are missing cannot be known.
    """
    import numpy as np

    data = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
    counts = np.empty(comm.size, dtype=np.int64)
    mine = np.array([data.size], dtype=np.int64)
    finish(comm.Iallgather(mine, counts), call, timeout_s, mine, counts, check=check)
    whole = np.empty(int(counts.sum()), dtype=np.uint8)
    # Not Iallgatherv on exact counts alone: displacements beyond an int are refused by MPI anyway.
    request = comm.Iallgatherv(data, [whole, counts])
    finish(request, call, timeout_s, data, whole, counts, check=check)
    ends = np.cumsum(counts)
    return [
        json.loads(whole[end - count : end].tobytes())
        for end, count in zip(ends, counts, strict=True)
    ]


_given_up: list[Any] = []
"""Requests that cannot be cancelled, with their memory: MPI may still write there."""


def give_up(*held: Any) -> None:
    """Keep requests that cannot be cancelled, and their memory, for good. Local."""
    _given_up.append(held)


def finish(
    request: MPI.Request, call: str, timeout_s: float, *memory: Any, check: Check = None
) -> None:
    """Wait for a request with a deadline. A collective that is late cannot be cancelled."""
    deadline = time.monotonic() + timeout_s
    while not request.Test():
        os.sched_yield()
        if check is not None:
            try:
                check()
            except BaseException:
                give_up(request, memory)
                raise
        if time.monotonic() > deadline and not request.Test():
            give_up(request, memory)
            raise PeerTimeout(
                f"{call} failed: not every rank of the communicator arrived within "
                f"{timeout_s:g} s. All of its ranks must call it.",
                ranks=(),
                timeout_s=timeout_s,
            )


def agree(
    comm: MPI.Comm, call: str, work: Callable[[], Any], timeout_s: float, check: Check = None
) -> list[Any]:
    """Do `work`, and learn by messages how it went on every rank; as `Agreement.step`."""
    error: BaseException | None = None
    value = None
    try:
        value = work()
    except PeerTimeout:
        raise  # nobody will answer
    except Exception as caught:
        error = caught
    # A rank that only heard of another's failure has none of its own to tell.
    own = None if error is None or type(error) is PeerError else words(error)
    told = gather(comm, call, [own, value], timeout_s, check)
    raise_together(call, None if own is None else error, [each[0] for each in told])
    if error is not None:
        raise error
    return [each[1] for each in told]


def raise_together(call: str, error: BaseException | None, told: Sequence[str | None]) -> None:
    """Raise this rank's own error, or `PeerError` if another rank told one. Local."""
    if error is not None:
        raise error
    failures = {rank: text for rank, text in enumerate(told) if text is not None}
    if failures:
        raise peer_error(call, failures)

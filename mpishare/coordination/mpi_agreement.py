"""Agreement by messages: across nodes, and before a node has its control block."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import time
from typing import TYPE_CHECKING, Any

from mpishare.coordination.abort import abort_unless_over
from mpishare.coordination.waits import STRAGGLER_S
from mpishare.errors import PeerError, PeerTimeout, describe, peer_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

    Check = Callable[[], None] | None

log = logging.getLogger("mpishare")

_WORD_NBYTES, _SHORT_NBYTES = 8, 248


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

    data = json.dumps(value).encode()
    # Most values are short: those that fit go along with their lengths, in one collective.
    mine = np.zeros(_WORD_NBYTES + _SHORT_NBYTES, dtype=np.uint8)
    mine[:_WORD_NBYTES].view("i8")[:] = len(data)
    told = np.empty((comm.size, mine.size), dtype=np.uint8)
    if len(data) <= _SHORT_NBYTES:
        mine[_WORD_NBYTES : _WORD_NBYTES + len(data)] = np.frombuffer(data, np.uint8)
    finish(comm.Iallgather(mine, told), call, timeout_s, mine, told, check=check)
    counts = told[:, :_WORD_NBYTES].copy().view("i8").reshape(-1)
    if counts.max() <= _SHORT_NBYTES:
        rows = zip(told[:, _WORD_NBYTES:], counts, strict=True)
        return [json.loads(row[:count].tobytes()) for row, count in rows]
    own = np.frombuffer(data, dtype=np.uint8)
    whole = np.empty(int(counts.sum()), dtype=np.uint8)
    # Not Iallgatherv on exact counts alone: displacements beyond an int are refused by MPI anyway.
    request = comm.Iallgatherv(own, [whole, counts])
    finish(request, call, timeout_s, own, whole, counts, check=check)
    ends = np.cumsum(counts)
    return [
        json.loads(whole[end - count : end].tobytes())
        for end, count in zip(ends, counts, strict=True)
    ]


def give_up(*held: Any) -> None:
    """Keep requests that cannot be cancelled, and their memory, for good. Local.

    Longer than the interpreter lives, which frees what it knows before MPI comes to its end.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


def finish(
    request: MPI.Request, call: str, timeout_s: float, *memory: Any, check: Check = None
) -> None:
    """Wait for a request with a deadline. A collective that is late cannot be cancelled.

    Without a `check` there is no node yet: then it warns of the late by itself, and if the
    collective is never over the job is aborted at exit.
    """
    begin, is_late = time.monotonic(), False
    while not request.Test():
        os.sched_yield()
        if check is not None:
            try:
                check()
            except BaseException:
                give_up(request, memory)
                raise
        waited_s = time.monotonic() - begin
        if check is None and waited_s > STRAGGLER_S and not is_late:
            is_late = True
            log.warning(
                "this rank has waited %.0f s in %s: not every rank of the communicator has called "
                "it (who has not, nobody knows yet)",
                waited_s,
                call,
            )
        if waited_s > timeout_s and not request.Test():
            give_up(request, memory)
            text = (
                f"{call} failed: not every rank of the communicator arrived within "
                f"{timeout_s:g} s. All of its ranks must call it."
            )
            if check is None:
                abort_unless_over(request, text)
            raise PeerTimeout(text, ranks=(), timeout_s=timeout_s)


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
    own = None if error is None or type(error) is PeerError else describe(error)
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

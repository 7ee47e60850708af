"""Agreement by MPI messages: across nodes, and before a node has its control block."""

from __future__ import annotations

import ctypes
import json
import logging
from typing import TYPE_CHECKING, Any

from mpishare.coordination.abort import abort_unless_over
from mpishare.coordination.poll import poll
from mpishare.errors import PeerError, PeerTimeout, describe, peer_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

    from mpishare.coordination.waits import WaitMonitor

    Monitor = WaitMonitor | None

log = logging.getLogger("mpishare")

_LENGTH_NBYTES, _SHORT_NBYTES = 8, 248


def allgather(
    comm: MPI.Comm, call: str, value: Any, timeout_s: float, monitor: Monitor = None
) -> list[Any]:
    """Return every rank's value, by messages with a deadline.

    Collective over `comm`, host-blocking.

    Parameters
    ----------
    value : object
        What JSON can hold.
    monitor : WaitMonitor, optional
        Watches the wait where there is a node; raises where there is no point in waiting on.

    Raises
    ------
    PeerTimeout
        If it is not complete in time. Which ranks are missing cannot be known.
    """
    import numpy as np

    data = json.dumps(value).encode()
    # Most values are short: those that fit go along with their lengths, in one collective.
    mine = np.zeros(_LENGTH_NBYTES + _SHORT_NBYTES, dtype=np.uint8)
    mine[:_LENGTH_NBYTES].view("i8")[:] = len(data)
    rows = np.empty((comm.size, mine.size), dtype=np.uint8)
    if len(data) <= _SHORT_NBYTES:
        mine[_LENGTH_NBYTES : _LENGTH_NBYTES + len(data)] = np.frombuffer(data, np.uint8)
    wait_request(comm.Iallgather(mine, rows), call, timeout_s, mine, rows, monitor=monitor)
    lengths = rows[:, :_LENGTH_NBYTES].copy().view("i8").reshape(-1)
    if lengths.max() <= _SHORT_NBYTES:
        pairs = zip(rows[:, _LENGTH_NBYTES:], lengths, strict=True)
        return [json.loads(row[:length].tobytes()) for row, length in pairs]
    own = np.frombuffer(data, dtype=np.uint8)
    whole = np.empty(int(lengths.sum()), dtype=np.uint8)
    request = comm.Iallgatherv(own, [whole, lengths])
    wait_request(request, call, timeout_s, own, whole, lengths, monitor=monitor)
    ends = np.cumsum(lengths)
    return [
        json.loads(whole[end - length : end].tobytes())
        for end, length in zip(ends, lengths, strict=True)
    ]


def never_free(*held: Any) -> None:
    """Keep requests that cannot be cancelled, and their memory, for good.

    Longer than the interpreter lives, which frees what it knows before MPI comes to its end.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


def wait_request(
    request: MPI.Request, call: str, timeout_s: float, *memory: Any, monitor: Monitor = None
) -> None:
    """Wait for a request with a deadline; a collective that is late cannot be cancelled.

    Without a monitor there is no node yet: then it warns of stragglers by itself, and if the
    collective is never over the job is aborted at exit.
    """

    def warn(waited_s: float) -> None:
        log.warning(
            "this rank has waited %.0f s in %s: not every rank of the communicator has called it "
            "(which ones cannot be known yet)",
            waited_s,
            call,
        )

    try:
        if monitor is None:
            is_over = poll(request.Test, timeout_s, warn=warn)
        else:
            is_over = poll(request.Test, timeout_s, monitor.look, warn=monitor.warn)
    except BaseException:
        never_free(request, memory)
        raise
    if not is_over:
        never_free(request, memory)
        text = (
            f"{call} failed: not every rank of the communicator arrived within {timeout_s:g} s. "
            "All of its ranks must call it."
        )
        if monitor is None:
            abort_unless_over(request, text)
        raise PeerTimeout(text, ranks=(), timeout_s=timeout_s)


def agree(
    comm: MPI.Comm, call: str, work: Callable[[], Any], timeout_s: float, monitor: Monitor = None
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
    replies = allgather(comm, call, [own, value], timeout_s, monitor)
    raise_together(call, None if own is None else error, [each[0] for each in replies])
    if error is not None:
        raise error
    return [each[1] for each in replies]


def raise_together(call: str, error: BaseException | None, failed: Sequence[str | None]) -> None:
    """Raise this rank's own error, or `PeerError` if another rank failed."""
    if error is not None:
        raise error
    failures = {rank: text for rank, text in enumerate(failed) if text is not None}
    if failures:
        raise peer_error(call, failures)

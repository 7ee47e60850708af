"""Agreement by MPI messages: across nodes, and before a node has its control block."""

from __future__ import annotations

import ctypes
import json
import logging
import struct
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from mpishare.coordination.abort import abort_at_exit
from mpishare.coordination.agreement import is_agreed, settle
from mpishare.coordination.missing_ranks import bystanding
from mpishare.coordination.poll import poll
from mpishare.errors import PeerError, PeerTimeout, describe, late_unknown

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi4py import MPI

    from mpishare.coordination.waits import WaitMonitor

T = TypeVar("T")

log = logging.getLogger("mpishare")

_ROW_NBYTES = 256
_LENGTH = struct.Struct("q")
_SHORT_NBYTES = _ROW_NBYTES - _LENGTH.size


def allgather(
    comm: MPI.Comm, call: str, value: Any, timeout_s: float, monitor: WaitMonitor | None = None
) -> list[Any]:
    """Return every rank's value, which JSON can hold. Collective over `comm`, host-blocking.

    Raises `PeerTimeout` if it is not complete in time, without the missing ranks, which MPI does
    not report. Where there is a node, its monitor may raise earlier.
    """
    from mpi4py import MPI

    data = json.dumps(value).encode()
    # Most values are short: those that fit travel with their lengths, in one collective.
    mine = bytearray(_ROW_NBYTES)
    _LENGTH.pack_into(mine, 0, len(data))
    if len(data) <= _SHORT_NBYTES:
        mine[_LENGTH.size : _LENGTH.size + len(data)] = data
    rows = bytearray(_ROW_NBYTES * comm.size)
    wait_request(comm.Iallgather(mine, rows), comm, call, timeout_s, mine, rows, monitor=monitor)
    lengths = [_LENGTH.unpack_from(rows, at)[0] for at in range(0, len(rows), _ROW_NBYTES)]
    if max(lengths) <= _SHORT_NBYTES:
        texts, begins = rows, [*range(_LENGTH.size, len(rows), _ROW_NBYTES)]
    else:
        texts, begins = bytearray(sum(lengths)), [0, *accumulate(lengths[:-1])]
        request = comm.Iallgatherv(data, [texts, lengths, MPI.BYTE])
        wait_request(request, comm, call, timeout_s, data, texts, lengths, monitor=monitor)
    pairs = zip(begins, lengths, strict=True)
    return [json.loads(texts[begin : begin + length].decode()) for begin, length in pairs]


def never_free(*held: Any) -> None:
    """Keep requests that cannot be cancelled, and their memory, for good.

    Beyond the end of the interpreter, which frees its objects before MPI is finalized.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


def wait_request(
    request: MPI.Request,
    comm: MPI.Comm,
    call: str,
    timeout_s: float,
    *memory: Any,
    monitor: WaitMonitor | None = None,
) -> None:
    """Wait for a request with a deadline; a collective that is late cannot be cancelled.

    Without a monitor the communicator has no node yet: then it warns of stragglers by itself, and
    if the collective is never over the job is aborted at exit.
    """

    def warn(waited_s: float) -> None:
        log.warning(
            "this rank has waited %.0f s in %s: not every rank of the communicator has called it "
            "(which ones cannot be known yet)",
            waited_s,
            call,
        )

    def wait() -> None:
        if monitor is None:
            with bystanding(comm, call) as look:
                is_over = poll(request.Test, timeout_s, look, warn=warn)
        else:
            is_over = poll(request.Test, timeout_s, monitor.look, warn=monitor.warn)
        if not is_over:
            raise late_unknown(call, timeout_s)

    try:
        wait()
    except BaseException as failure:
        never_free(request, memory)
        agreed = is_agreed(failure)
        failure.is_unanswered = not agreed  # type: ignore[attr-defined]
        if monitor is None and agreed:
            abort_at_exit(str(failure), request.Test)
        raise


def agree(comm: MPI.Comm, call: str, work: Callable[[], Any], timeout_s: float) -> list[Any]:
    """Do `work` and return its results on all ranks, by messages; as `Agreement.step`."""
    return agree_keeping(comm, call, lambda: (None, work()), timeout_s)[1]


def agree_keeping(
    comm: MPI.Comm,
    call: str,
    work: Callable[[], tuple[T, Any]],
    timeout_s: float,
    monitor: WaitMonitor | None = None,
    *,
    arrived: Callable[[], object] = int,
) -> tuple[T, list[Any]]:
    """Do a step by messages as `Agreement.step_keeping`.

    `arrived` is called once the messages of all ranks are here.
    """
    error: BaseException | None = None
    kept: Any = None
    reply = None
    try:
        kept, reply = work()
    except PeerTimeout:
        raise  # no other rank will answer
    except Exception as caught:
        if getattr(caught, "is_unanswered", False):
            raise  # a signal handler's, in a step within this one: the others are still in that
        error = caught
    # A rank that only heard of another's failure has none of its own.
    own = None if error is None or type(error) is PeerError else describe(error)
    replies = allgather(comm, call, [call, own, reply], timeout_s, monitor)
    arrived()
    results = settle(call, replies, None if own is None else error, comm.rank, "communicator")
    if error is not None:
        raise error
    return kept, results

"""Steps by MPI messages: across nodes, and before a node has its control block.

MPI does not report which ranks are missing. Nodes know it of theirs, and where these wait, so each
wait for messages is watched by one node or by several.

A communicator's group does not have the processes that are its ranks. That of a cart or graph with
fewer ranks than the communicator it was made of is, in MPICH 5.0.2, the group of that communicator,
and so are the groups of what is made of it in turn (docs/mpi-faults.md). So each process sends its
id once, and MPI keeps these with the communicator.
"""

from __future__ import annotations

import ctypes
import functools
import json
import logging
import os
import struct
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from mpishare.coordination.abort import abort_at_exit
from mpishare.coordination.agreement import is_agreed, settle
from mpishare.coordination.control_block import fitting
from mpishare.coordination.life import Event
from mpishare.coordination.poll import poll
from mpishare.coordination.waits import PUBLISH_S, WaitMonitor, of_this_thread
from mpishare.errors import (
    MpiShareError,
    PeerError,
    PeerTimeout,
    describe,
    late_unknown,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from mpi4py import MPI

    from mpishare.coordination.waits import Waits

T = TypeVar("T")

log = logging.getLogger("mpishare")

_ROW_NBYTES = 256
_LENGTH = struct.Struct("q")
_SHORT_NBYTES = _ROW_NBYTES - _LENGTH.size
# By then a waiting rank has published its wait, and a message that was sent is here.
_SETTLED_S = 4 * PUBLISH_S

Ranks = dict[int, int]
"""The numbers of a communicator's ranks, by the process and in their order."""

# World ranks would not do: processes that were spawned have a world of their own.
_NBYTES = 8
_MINE = os.urandom(_NBYTES)


class NodeWatch(WaitMonitor):
    """Watches the messages of a call for the ranks of a node that must make it."""

    def __init__(self, node: Waits, ranks: Collection[int], call: str) -> None:
        self._node, self.call = node, call
        self._absent = partial(_absent, node, ranks, call)
        super().__init__(node, call, self._absent, node.check_whole)

    def wait(self, request: MPI.Request) -> None:
        """Wait for a request; name the missing ranks, if these are of the node.

        After a `PeerTimeout` the node is broken: a collective that is late cannot be cancelled.
        """
        node = self._node
        if self.poll(request.Test):
            return
        # Those that have just come get the time to publish it.
        poll(lambda: not self._absent(), _SETTLED_S)
        if missing := self._absent():
            raise node.timed_out(self.call, missing)
        raise node.life.end_by(Event.DEADLINE, late_unknown(self.call, node.timeout_s))


@contextmanager
def watching(node: Waits, ranks: Collection[int], call: str) -> Iterator[NodeWatch]:
    """Watch the waits of a call within the block, as `NodeWatch`."""
    # Both end last: this rank must not seem missing before it has left.
    with node.waiting_in(call), NodeWatch(node, ranks, call) as watch:
        yield watch


class CommWatch:
    """Watches the messages of a call that has no node itself: the missing ranks are not known.

    It ends where a rank of another node of this thread is missing, unless that was so before.
    """

    def __init__(self, call: str, timeout_s: float) -> None:
        self.call, self.timeout_s = call, timeout_s
        self._over = [node for node in of_this_thread() if node.life.failure is not None]

    def wait(self, request: MPI.Request) -> None:
        """Wait for a request, with the deadline."""
        if not poll(request.Test, self.timeout_s, self._look, warn=self._warn):
            raise late_unknown(self.call, self.timeout_s)

    def _look(self) -> None:
        for node in of_this_thread():
            if node.life.is_fatal and node not in self._over:
                node.check_whole()

    def _warn(self, waited_s: float) -> None:
        log.warning(
            "this rank has waited %.0f s in %s: not every rank of the communicator has called it "
            "(which ones cannot be known yet)",
            waited_s,
            self.call,
        )


Watch = NodeWatch | CommWatch


def _absent(node: Waits, ranks: Collection[int], call: str) -> list[int]:
    """Return the ranks that do not wait in this call now."""
    published = fitting(call)
    found = {rank: node.block.status(rank) for rank in ranks if rank != node.rank}
    return [rank for rank, each in found.items() if each is None or each.call != published]


def never_free(*held: Any) -> None:
    """Keep requests that cannot be cancelled, and their memory, for good.

    Beyond the end of the interpreter, which frees its objects before MPI is finalized.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


def wait_request(request: MPI.Request, watch: Watch, *memory: Any) -> None:
    """Wait for a collective with a deadline; one that is late cannot be cancelled.

    Without a node of its own the job is aborted at exit, if the collective is never over.
    """
    try:
        watch.wait(request)
    except BaseException as failure:
        never_free(request, memory)
        # A departure from another node may have been seen by this rank alone.
        failure.is_unanswered = not (isinstance(watch, NodeWatch) and is_agreed(failure))  # type: ignore[attr-defined]
        if isinstance(failure, PeerTimeout) and isinstance(watch, CommWatch):
            abort_at_exit(str(failure), request.Test)
        raise


@functools.cache
def _key() -> int:
    """Return the attribute of communicators that holds their `Introduction`.

    It goes with the communicator. No duplicate has it by itself: Open MPI 5.0.11 copies attributes
    to what `Create_group` makes, too, which has other ranks.
    """
    from mpi4py import MPI

    return MPI.Comm.Create_keyval()


class Introduction:
    """The one all-gather of a communicator in which its ranks send their ids.

    These never change. So a call that ended while ranks were missing leaves it to the next call on
    the communicator, which goes on waiting for the same messages.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._rows = bytearray(_NBYTES * comm.size)
        self.request = comm.Iallgather(_MINE, self._rows)
        self.ranks: Ranks = {}

    @classmethod
    def of(cls, comm: MPI.Intracomm) -> Introduction:
        """Return that of a communicator; begin it if there is none."""
        found = comm.Get_attr(_key())
        if not isinstance(found, Introduction):
            found = cls(comm)
            comm.Set_attr(_key(), found)
        return found

    def end(self) -> None:
        """Read the ids, once the request is complete."""
        self.ranks = {each: rank for rank, each in enumerate(memoryview(self._rows).cast("q"))}


def known(comm: MPI.Comm) -> Ranks:
    """Return the ranks of a communicator, none while they have not introduced themselves. Local."""
    found = comm.Get_attr(_key())
    return found.ranks if isinstance(found, Introduction) else {}


def ranks_in(node: Waits, comm: MPI.Comm) -> list[int]:
    """Return the other ranks of a node that a communicator has, as far as they are known."""
    there = known(comm)
    return sorted(rank for each, rank in node.ranks.items() if each in there and rank != node.rank)


def pass_on(comm: MPI.Intracomm, duplicate: MPI.Intracomm) -> None:
    """Let the ranks of a duplicate be known by those of its communicator."""
    duplicate.Set_attr(_key(), comm.Get_attr(_key()))


def identify(comm: MPI.Intracomm, watch: Watch) -> Ranks:
    """Return the ranks of a communicator.

    Collective over it the first time, host-blocking; local from then on.
    """
    introduction = Introduction.of(comm)
    if not introduction.ranks:
        wait_request(introduction.request, watch, introduction)
        introduction.end()
    return introduction.ranks


def allgather(comm: MPI.Comm, value: Any, watch: Watch) -> list[Any]:
    """Return every rank's value, which JSON can hold. Collective over `comm`, host-blocking."""
    from mpi4py import MPI

    data = json.dumps(value).encode()
    # Most values are short: those that fit travel with their lengths, in one collective.
    mine = bytearray(_ROW_NBYTES)
    _LENGTH.pack_into(mine, 0, len(data))
    if len(data) <= _SHORT_NBYTES:
        mine[_LENGTH.size : _LENGTH.size + len(data)] = data
    rows = bytearray(_ROW_NBYTES * comm.size)
    wait_request(comm.Iallgather(mine, rows), watch, mine, rows)
    lengths = [_LENGTH.unpack_from(rows, at)[0] for at in range(0, len(rows), _ROW_NBYTES)]
    if max(lengths) <= _SHORT_NBYTES:
        texts, begins = rows, [*range(_LENGTH.size, len(rows), _ROW_NBYTES)]
    else:
        texts, begins = bytearray(sum(lengths)), [0, *accumulate(lengths[:-1])]
        request = comm.Iallgatherv(data, [texts, lengths, MPI.BYTE])
        wait_request(request, watch, data, texts, lengths)
    pairs = zip(begins, lengths, strict=True)
    return [json.loads(texts[begin : begin + length].decode()) for begin, length in pairs]


def agree(comm: MPI.Comm, work: Callable[[], Any], watch: Watch) -> list[Any]:
    """Do `work` and return its results on all ranks, by messages; as `Agreement.step`."""
    return agree_keeping(comm, lambda: (None, work()), watch)[1]


def agree_keeping(
    comm: MPI.Comm, work: Callable[[], tuple[T, Any]], watch: Watch
) -> tuple[T, list[Any]]:
    """Do a step by messages as `Agreement.step_keeping`."""
    error: Exception | None = None
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
    try:
        replies = allgather(comm, [watch.call, own, reply], watch)
        mine = None if own is None else error
        results = settle(watch.call, replies, mine, comm.rank, "communicator")
        if error is not None:
            raise error
        return kept, results
    finally:
        error = mine = None  # else a cycle with its traceback would hold the caller's arrays


# --- communicators


@contextmanager
def making_communicators(call: str) -> Iterator[None]:
    """Add the number of open plans to the error where MPI has no communicator left."""
    from mpi4py import MPI

    try:
        yield
    except MPI.Exception as error:
        why = str(error).splitlines()[-1]
        comms = [each for node in of_this_thread() for each in node.plan_comms.values()]
        plans = sum(len(each.tags_taken) for each in comms)
        raise MpiShareError(
            f"{call} failed: MPI made no communicator ({why}). mpishare has {plans} plans open "
            f"on this rank, on {len(comms)} communicators: one for all plans of the same ranks. "
            "Free communicators that the program made and needs no more (cart.Free())."
        ) from error


def require_intracomm(
    call: str, comm: Any, wanted: str = "comm must be an Intracomm"
) -> MPI.Intracomm:
    """Return a communicator that has this rank; `TypeError` for anything else."""
    from mpi4py import MPI

    if isinstance(comm, MPI.Intracomm) and comm != MPI.COMM_NULL:
        return comm
    is_null = isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL
    if isinstance(getattr(comm, "comm", None), MPI.Intracomm):
        raise TypeError(
            f"{call} failed: the communicator comes first: node.comm, not the {type(comm).__name__}"
        )
    kind = "COMM_NULL: this rank is not in it, or it was freed" if is_null else type(comm).__name__
    raise TypeError(f"{call} failed: {wanted}, not {kind}")


def duplicate(given: MPI.Intracomm, watch: Watch) -> MPI.Intracomm:
    """Return a duplicate of a communicator, whose ranks are known. Collective, host-blocking."""
    identify(given, watch)
    with making_communicators(watch.call):
        comm, request = given.Idup()
        wait_request(request, watch, comm)
    pass_on(given, comm)
    return comm

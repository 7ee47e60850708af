"""Collective steps of a node: every rank succeeds or every rank raises."""

from __future__ import annotations

import dis
import functools
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from mpishare.coordination.control_block import MAILBOX_NBYTES, ControlBlock
from mpishare.coordination.poll import rounds
from mpishare.coordination.recording import require_none
from mpishare.coordination.waits import Waits
from mpishare.coordination.where import place
from mpishare.errors import (
    HandleError,
    MpiShareError,
    UnsupportedError,
    describe,
    escaped,
    mismatch,
    peer_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

T = TypeVar("T")

_RAISE = dis.opmap["RAISE_VARARGS"]  # the instruction of a `raise` statement


class Agreement(Waits):
    """Agreement of one rank with the others of its node, through the control block."""

    def __init__(self, block: ControlBlock, timeout_s: float) -> None:
        super().__init__(block, timeout_s)
        self._number = self._meetings = 0  # rounds of mail; meetings
        self._steps = 0  # by mail and by messages
        self._inside = self._call = ""  # the step under way, and that of the last one
        self._meet: Any = None  # the function that goes through the rounds of a meeting

    def open_meetings(self, fence: Callable[..., Callable[[int], int]]) -> None:
        """Make the rounds of a meeting by `fence`; see `NodeContext.fence`."""
        slot = self.block.meeting_slot
        each = [
            (slot(self.rank, number), [slot(r, number) for r in awaited])
            for number, awaited in enumerate(rounds(self.rank, self.size))
        ]
        self._meet = fence(self.block.words, each)

    def close(self) -> None:
        """Release the words of meetings, before the block is unmapped."""
        self._meet = None
        self.ranks = {}

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Leave the node where a call within ends on this rank alone, behind its first step.

        The others are in the next step, and must not take the first one of a later call for it.
        """
        before = self._steps
        try:
            yield
        except BaseException as error:
            if self._steps != before and not is_agreed(error):
                self.life.leave(self._call, error)
            raise

    def begin_step(self, call: str) -> None:
        """Note a step, also one of ranks that agree by messages, for `collective`."""
        self._call = call
        self._steps += 1

    def step(self, call: str, work: Callable[[], Any]) -> list[Any]:
        """Do `work` and return its results on all ranks, by rank. Collective, host-blocking.

        About 10 us beside the work itself, which returns a value that JSON can hold. `call` names
        the collective call of this step, for ranks in another one. Raises this rank's own error;
        else `PeerError` if the work of another rank failed, `MismatchError` if another rank is in
        another call, `PeerTimeout` if one died or did not arrive.
        """
        return self.step_keeping(call, lambda: (None, work()))[1]

    def step_keeping(self, call: str, work: Callable[[], tuple[T, Any]]) -> tuple[T, list[Any]]:
        """Do a step whose work returns any object for this rank, and its reply to all ranks.

        Return that object, and the replies of all ranks. An `Exception` is a failure of the work,
        and leaves the node whole; an interrupt ends the node.
        """
        self._require_collective(call)
        self.begin_step(call)
        mine: Exception | None = None
        kept = told = cast("Any", None)
        try:
            self._inside = call
            try:
                kept, told = work()
            except HandleError as error:
                mine = error
                self.require_all_here(call)  # since a rank's result may offer memory
            except Exception as error:
                mine = error
            finally:
                self._inside = ""
            reply = [call, None, told] if mine is None else [call, describe(mine), None]
            messages = self._exchange(call, json.dumps(reply).encode())
            known = {text: json.loads(text) for text in {*messages}}  # most are the same
            where = {}
            if len({called for called, *_ in known.values()}) > 1:  # so all ranks come here
                # Escaped, since the name of a file may have bytes that are no text.
                here = escaped(place(self.block, self.owner))
                places = self._exchange(call, here.encode())
                where = {r: places[r].decode() for r in self.others}
        except MpiShareError:
            if mine is None or isinstance(mine, HandleError):
                raise  # what a rank had shared may have gone with it, before it said so
            # This rank's own error comes first, with the departure of the others as its context.
            raise mine  # noqa: B904
        except BaseException as error:
            # An interrupt, no failure of the work. The others may have received this rank's part.
            self.life.leave(call, error)
            raise
        try:
            replies = [known[text] for text in messages]
            return kept, settle(call, replies, mine, self.rank, "node", where)
        finally:
            mine = None  # avoids a cycle with its traceback, which may hold large arrays

    def meet(self, call: str) -> None:
        """Wait until all ranks are in this call. Collective, host-blocking: some microseconds.

        Only `Node.barrier` uses it.
        """
        self._require_collective(call)
        self._meetings += 1
        count = self._meetings
        with self.blocked(call):
            while (at := self._meet(count)) >= 0:
                self.wait(call, functools.partial(self._absent, count, at))

    def _absent(self, count: int, at: int) -> list[int]:
        """Return the ranks that have not come to a meeting, for the wait for one word of it."""
        words, slot = self.block.words, self.block.meeting_slot
        if words[at] >= count:
            return []
        absent = [rank for rank in self.others if words[slot(rank, 0)] < count]
        return absent or [self.block.rank_of_slot(at)]

    def _require_collective(self, call: str) -> None:
        self.check()
        if self._inside:
            raise UnsupportedError(
                f"{call} was called inside {self._inside}: a callable that is given to share() "
                "runs on one rank alone, and may make no collective call."
            )
        require_none(call, "it is made on the host, and no replay would make it again")

    def _exchange(self, call: str, data: bytes) -> list[bytes]:
        received = [bytearray() for _ in range(self.size)]
        start = 0
        while True:
            self._number += 1
            number = self._number
            self.block.post_mail(number, len(data), data[start : start + MAILBOX_NBYTES])
            self.wait(call, functools.partial(self._silent, number))
            totals = []
            for rank in range(self.size):
                total, part = self.block.read_mail(rank, number, start)
                totals.append(total)
                received[rank] += part
            start += MAILBOX_NBYTES
            if start >= max(totals):
                return [bytes(part) for part in received]

    def _silent(self, number: int) -> list[int]:
        has_mail = self.block.has_mail
        return [rank for rank in self.others if not has_mail(rank, number)]


def note_agreed(error: BaseException) -> None:
    """Note that the other ranks know of an error, for `is_agreed`."""
    error.is_agreed = True  # type: ignore[attr-defined]


def is_agreed(error: BaseException) -> bool:
    """Whether every rank raises this error or learns of it.

    False for one that this rank alone raises, between two steps or in a wait: a signal handler may
    raise anything anywhere, and so may a function of Python or NumPy that our code calls.
    """
    if getattr(error, "is_agreed", False):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not isinstance(error, MpiShareError | TypeError | ValueError):
        return False
    frame = trace.tb_frame
    is_ours = str(frame.f_globals.get("__name__")).startswith("mpishare.")
    return is_ours and frame.f_code.co_code[trace.tb_lasti] == _RAISE


def settle(
    call: str,
    replies: Sequence[Any],
    error: BaseException | None,
    rank: int,
    of: str,
    where: Mapping[int, str] | None = None,
) -> list[Any]:
    """Return the results of a step by rank, or raise on every rank: this one's own error first.

    A reply has the call, the text of an error or None, and the result; `of` names the group of
    ranks, `where` places of others as far as they are known.
    """
    if error is not None:
        note_agreed(error)
        try:
            raise error
        finally:
            error = None  # avoids a cycle with its traceback
    calls = {r: called for r, (called, *_) in enumerate(replies)}
    if len({*calls.values()}) > 1:
        rule = f"Collective calls are made in the same order on all ranks of a {of}."
        what = "ranks made different collective calls"
        raise mismatch(what, calls, rank, "called", rule, where or {})
    failures = {r: text for r, (_, text, _) in enumerate(replies) if text is not None}
    if failures:
        raise peer_error(call, failures)
    return [result for *_, result in replies]


def require_same(call: str, values: Sequence[Any], mine: int) -> None:
    """Raise `MismatchError` on every rank unless all gave the same value.

    Makes no call of its own: every rank already holds all values, so all raise or none does.
    """
    if all(value == values[0] for value in values):
        return
    texts = [_arguments(value) for value in _differing(values)]
    what = f"{call} failed: ranks gave different arguments"
    raise mismatch(
        what, dict(enumerate(texts)), mine, "gave", "They must be the same on all ranks."
    )


def _differing(values: Sequence[Any]) -> Sequence[Any]:
    """Return the values without arguments that are equal on all ranks, which would hide others."""
    if not all(isinstance(value, dict) and value.keys() == values[0].keys() for value in values):
        return values
    names = [name for name in values[0] if any(v[name] != values[0][name] for v in values)]
    return [{name: value[name] for name in names} for value in values]


def _arguments(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={item!r}" for name, item in value.items())
    return repr(value)

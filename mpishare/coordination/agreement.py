"""Every rank succeeds or every rank raises."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from mpishare.coordination.control_block import MAILBOX_NBYTES, ControlBlock
from mpishare.coordination.recording import require_none
from mpishare.coordination.waits import Waits
from mpishare.errors import MismatchError, MpiShareError, UnsupportedError, describe, peer_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Agreement(Waits):
    """What one rank agrees on with the others of its node, through the control block."""

    def __init__(self, block: ControlBlock, timeout_s: float) -> None:
        super().__init__(block, timeout_s)
        self._number = 0  # of rounds of mail
        self._steps = 0
        self._inside = ""

    def step(self, call: str, work: Callable[[], Any]) -> list[Any]:
        """Do `work`, then learn how it went on every rank.

        Collective, host-blocking: about 10 us beside the work itself.

        Parameters
        ----------
        call : str
            The name of the collective call that this is a step of, for a rank that is in another
            one.
        work : callable
            May raise anything; returns what JSON can hold.

        Returns
        -------
        list
            What each rank's work returned, by rank.

        Raises
        ------
        BaseException
            This rank's own error; the others raise `PeerError`.
        PeerError
            If the work of another rank failed.
        MismatchError
            If another rank is in another collective call.
        PeerTimeout
            If a rank died or did not arrive.
        """
        self.check()
        if self._inside:
            raise UnsupportedError(
                f"{call} was called inside {self._inside}: a callable that is given to share() "
                "runs on one rank alone, and may make no collective call."
            )
        require_none(call, "it is made on the host, and no replay would make it again")
        self._steps += 1
        mine: BaseException | None = None
        self._inside = call
        try:
            reply = [call, self._steps, None, work()]
        except BaseException as error:
            mine = error
            reply = [call, self._steps, describe(error), None]
        finally:
            self._inside = ""
        try:
            messages = self._exchange(call, json.dumps(reply).encode())
        except MpiShareError:
            if mine is None:
                raise
            # This rank's own error comes first; that the others are gone too stands behind it.
            raise mine  # noqa: B904
        except BaseException as error:
            # An interrupt: the others may have had this rank's part, it has not had theirs.
            self.leave(call, error)
            raise
        if mine is not None:
            try:
                raise mine
            finally:
                mine = None  # no circle with its traceback, which may hold large arrays
        replies = [json.loads(message) for message in messages]
        self._same_call(replies)
        failures = {rank: reply[2] for rank, reply in enumerate(replies) if reply[2] is not None}
        if failures:
            raise peer_error(call, failures)
        return [reply[3] for reply in replies]

    def _same_call(self, replies: Sequence[Sequence[Any]]) -> None:
        calls = [tuple(reply[:2]) for reply in replies]
        mine = calls[self.rank]
        if all(other == mine for other in calls):
            return
        are_named = len({call for call, _ in calls}) > 1
        names = [call if are_named else f"{call}, step {step}" for call, step in calls]
        raise MismatchError(
            "ranks made different collective calls: "
            + "; ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
            + ". Collective calls are made in the same order on all ranks of a node.",
            failures={r: f"called {names[r]}" for r, call in enumerate(calls) if call != mine},
        )

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


def require_same(call: str, values: Sequence[Any], mine: int) -> None:
    """Raise `MismatchError` on every rank unless all gave the same value.

    Local: every rank holds every rank's value already, so all raise or none does.
    """
    if all(value == values[0] for value in values):
        return
    if all(isinstance(value, dict) and value.keys() == values[0].keys() for value in values):
        # What is the same everywhere would only hide the rest.
        names = [name for name in values[0] if any(v[name] != values[0][name] for v in values)]
        values = [{name: value[name] for name in names} for value in values]
    raise MismatchError(
        f"{call} failed: ranks gave different arguments: "
        + "; ".join(f"rank {rank}: {_arguments(value)}" for rank, value in enumerate(values))
        + ". They must be the same on all ranks.",
        failures={
            rank: f"gave {_arguments(value)}"
            for rank, value in enumerate(values)
            if value != values[mine]
        },
    )


def _arguments(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={item!r}" for name, item in value.items())
    return repr(value)

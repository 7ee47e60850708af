"""Case ``event``: record and wait, one hop from the owner to all waiters, and there and back.

The baselines are what one writes without events: wait for the GPU, then `MPI_Bcast`, or `MPI_Send`
and `MPI_Recv`, of one word.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mpishare.bench.cases import Case
from mpishare.bench.check import Check, Part, word
from mpishare.bench.comparison import Comparison, Variant
from mpishare.bench.session import Call, Session, do_nothing, in_turn

#: How the owner sends and the others receive, and how it is closed.
Signal = tuple[Call, Call, Call]
MakeSignal = Callable[[Session, int, list[int] | None], Signal]

#: Words that a rank writes by turns. A chain of checked steps is shorter, and ends with an
#: agreement, so that no word is written again before all have read it.
_SLOTS = 8


def run(session: Session, case: Case) -> None:
    least = min(session.comm.allgather(session.node.size))
    unfit = "an event needs two ranks on every node" if least < 2 else None
    comparison = Comparison(session, case, unfit=unfit)
    hop, pingpong = partial(_Hop, session), partial(_PingPong, session)
    comparison.add("hop", partial(hop, _event), against=("bcast",))
    comparison.add("pingpong", partial(pingpong, _event), against=("send",))
    comparison.add_baseline("bcast", partial(hop, _bcast))
    comparison.add_baseline("send", partial(pingpong, _message))
    comparison.run()


def _event(session: Session, owner: int, waiters: list[int] | None) -> Signal:
    event = session.node.event(owner=owner, waiters=waiters)
    return event.record, event.wait, event.close


def _bcast(session: Session, owner: int, waiters: list[int] | None) -> Signal:  # noqa: ARG001
    bcast = partial(session.node.comm.Bcast, np.zeros(1, "u8"), owner)
    return session.synchronized(bcast), bcast, do_nothing


def _message(session: Session, owner: int, waiters: list[int] | None) -> Signal:
    comm, word = session.node.comm, np.zeros(1, "u8")
    (waiter,) = waiters or [owner]
    send = session.synchronized(partial(comm.Send, word, waiter))
    return send, partial(comm.Recv, word, owner), do_nothing


class _Hop(Variant):
    """The owner sends, the waiters receive; checked by a word that the owner writes before."""

    moves = False

    def __init__(
        self,
        session: Session,
        signal: MakeSignal,
        owner: int | None = None,
        waiter: int | None = None,
    ) -> None:
        node, xp = session.node, session.node.xp
        owner = node.leader if owner is None else owner
        is_owner, is_waiter = node.rank == owner, waiter in (None, node.rank) and node.rank != owner
        self._window = node.allocate((_SLOTS, 1), "u8", owner=owner, fill=0)
        part = Part(0, ..., xp.full(1, word(owner, 0, 0), "u8"))
        self.check = Check(xp, self._slot(0), [part] * is_owner, [part] * is_waiter, [])
        made = signal(session, owner, None if waiter is None else [waiter])
        send, receive, self._close_signal = made
        self.step = send if is_owner else receive if is_waiter else do_nothing

    def _slot(self, token: int) -> list[Any]:
        return [self._window.array[token % _SLOTS]]

    def fill(self, token: int) -> None:
        self.check.fill(self._slot(token), token)

    def verify(self, token: int) -> None:
        self.check.verify(self._slot(token), token)

    def close(self) -> None:
        self._close_signal()
        self._window.close()


class _PingPong(Variant):
    """A hop from the leader to one partner, and one back."""

    moves = False

    def __init__(self, session: Session, signal: MakeSignal) -> None:
        leader = session.node.leader
        partner = (leader + 1) % session.node.size
        pairs = (leader, partner), (partner, leader)
        self._hops = [_Hop(session, signal, *pair) for pair in pairs]
        self.step = in_turn(*(hop.step for hop in self._hops))

    def checked_step(self, token: int) -> None:
        for hop in self._hops:
            hop.checked_step(token)

    def wrong(self) -> int:
        return sum(hop.wrong() for hop in self._hops)

    def close(self) -> None:
        for hop in self._hops:
            hop.close()

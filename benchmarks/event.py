"""Case ``event``: record and wait, one hop from the owner to all waiters, and there and back.

The baselines are what one writes without events: wait for the GPU, then `MPI_Bcast`, or `MPI_Send`
and `MPI_Recv`, of one word.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from mpishare.bench.cases import Case
from mpishare.bench.check import Pattern
from mpishare.bench.comparison import Comparison, Variant
from mpishare.bench.session import Session, do_nothing

MakeSignal = Callable[[Session, int, list[int] | None], "_Signal"]


#: Words that a rank writes by turns. A chain of checked steps is shorter, and ends with an
#: agreement, so that no word is written again before all have read it.
_SLOTS = 8


def run(session: Session, case: Case) -> None:
    pattern = Pattern(session.node.xp, 1)
    comparison = Comparison(session, case, unfit=session.too_few_ranks("an event"))
    hop, pingpong = partial(_Hop, session, pattern), partial(_PingPong, session, pattern)
    comparison.add("hop", partial(hop, _event), against=("bcast",))
    comparison.add("pingpong", partial(pingpong, _event), against=("send",))
    comparison.add_baselines("bcast", {"bcast": partial(hop, _bcast)})
    comparison.add_baselines("send", {"send": partial(pingpong, _message)})
    comparison.run()


class _Signal(NamedTuple):
    """How the owner sends and the others receive, and how it is closed."""

    send: Callable[[], None]
    receive: Callable[[], None]
    close: Callable[[], None]


def _event(session: Session, owner: int, waiters: list[int] | None) -> _Signal:
    event = session.node.event(owner=owner, waiters=waiters)
    return _Signal(event.record, event.wait, event.close)


def _bcast(session: Session, owner: int, waiters: list[int] | None) -> _Signal:  # noqa: ARG001
    bcast = partial(session.node.comm.Bcast, np.zeros(1, "u8"), owner)
    return _Signal(session.synchronized(bcast), bcast, do_nothing)


def _message(session: Session, owner: int, waiters: list[int] | None) -> _Signal:
    comm, word = session.node.comm, np.zeros(1, "u8")
    (waiter,) = waiters or [owner]
    send = session.synchronized(partial(comm.Send, word, waiter))
    return _Signal(send, partial(comm.Recv, word, owner), do_nothing)


class _Hop(Variant):
    """The leader sends, all others receive; checked by a word that the leader writes before."""

    moves = False

    def __init__(self, session: Session, pattern: Pattern, signal: MakeSignal) -> None:
        self.node, self.check = session.node, pattern
        self.window = self.node.allocate((2, _SLOTS, 1), "u8", fill=0)
        self.signals = self.make_signals(partial(signal, session))

    def make_signals(self, signal: Callable[..., _Signal]) -> list[_Signal]:
        return [signal(self.node.leader, None)]

    def step(self) -> None:
        if self.node.is_leader:
            self.signals[0].send()
        else:
            self.signals[0].receive()

    def fill(self, token: int) -> None:
        if self.node.is_leader:
            self.check.fill(self.window.array[0, token % _SLOTS], self.node.leader, 0, token)

    def verify(self, token: int) -> None:
        self.check.verify(self.window.array[0, token % _SLOTS], self.node.leader, 0, token)

    def close(self) -> None:
        for signal in self.signals:
            signal.close()
        self.window.close()


class _PingPong(_Hop):
    """The leader sends, one partner receives and answers, the leader receives.

    In a checked step each of the two writes a word before it sends and reads the other's.
    """

    def make_signals(self, signal: Callable[..., _Signal]) -> list[_Signal]:
        leader = self.node.leader
        self.partner = (leader + 1) % self.node.size
        return [signal(leader, [self.partner]), signal(self.partner, [leader])]

    def step(self) -> None:
        there, back = self.signals
        if self.node.is_leader:
            there.send()
            back.receive()
        elif self.node.rank == self.partner:
            there.receive()
            back.send()

    def checked_step(self, token: int) -> None:
        slot, words = token % _SLOTS, self.window.array
        question, answer = words[0, slot], words[1, slot]
        node, pattern, (there, back) = self.node, self.check, self.signals
        if node.is_leader:
            pattern.fill(question, node.leader, 0, token)
            there.send()
            back.receive()
            pattern.verify(answer, self.partner, 1, token)
        elif node.rank == self.partner:
            there.receive()
            pattern.verify(question, node.leader, 0, token)
            pattern.fill(answer, self.partner, 1, token)
            back.send()

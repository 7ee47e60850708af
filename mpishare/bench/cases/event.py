"""Case ``event``: record and wait, one hop from the owner to all waiters, and there and back.

The baselines are what one writes without events: wait for the GPU, then `MPI_Bcast`, or `MPI_Send`
and `MPI_Recv`, of one word.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mpishare.bench.comparison import Comparison, Variant
from mpishare.bench.problems.check import Pattern

if TYPE_CHECKING:
    from mpishare.bench.cases import Case
    from mpishare.bench.report.rows import Row
    from mpishare.bench.session import Session

#: Words that a rank writes by turns. A chain of checked steps is shorter, and ends with an
#: agreement, so that no word is written again before all have read it.
_SLOTS = 8


def run(session: Session, case: Case) -> list[Row]:
    """Run the case and return its rows. Collective, host-blocking."""
    pattern = Pattern(session.node.xp, 1)
    unfit = None
    if min(session.comm.allgather(session.node.size)) < 2:
        unfit = "an event needs two ranks on every node"
    comparison = Comparison(session, case, unfit=unfit)
    comparison.add("hop", partial(_Hop, session, pattern), against=("bcast",))
    comparison.add("pingpong", partial(_PingPong, session, pattern), against=("send",))
    comparison.add_baselines("bcast", {"bcast": partial(_Bcast, session, pattern)})
    comparison.add_baselines("send", {"send": partial(_Send, session, pattern)})
    return comparison.run()


class _Hop(Variant):
    """The leader records, all others wait; checked by a word that the leader writes before."""

    moves = False

    def __init__(self, session: Session, pattern: Pattern) -> None:
        self.session = session
        self.node = session.node
        self.pattern = pattern
        self.window = self.node.allocate((2, _SLOTS, 1), "u8", fill=0)
        self.prepare()

    def prepare(self) -> None:
        """Make what the step needs. Collective."""
        self._event = self.node.event()

    def step(self) -> None:
        if self.node.is_leader:
            self._event.record()
        else:
            self._event.wait()

    def fill(self, token: int) -> None:
        if self.node.is_leader:
            self.pattern.fill(self.window.array[0, token % _SLOTS], self.node.leader, 0, token)

    def verify(self, token: int) -> None:
        self.pattern.verify(self.window.array[0, token % _SLOTS], self.node.leader, 0, token)

    def wrong(self) -> int:
        return self.pattern.wrong()

    def free(self) -> None:
        """Close what `prepare` made. Collective."""
        self._event.close()

    def close(self) -> None:
        self.free()
        self.window.close()


class _Bcast(_Hop):
    """The baseline of a hop."""

    def prepare(self) -> None:
        self._word = np.zeros(1, "u8")

    def step(self) -> None:
        if self.node.is_leader:
            self.session.synchronize()
        self.node.comm.Bcast(self._word, self.node.leader)

    def free(self) -> None:
        pass


class _PingPong(_Hop):
    """The leader records, one partner waits and records, the leader waits; the others do nothing.

    In a checked step each of the two writes a word before it records and reads the other's.
    """

    def prepare(self) -> None:
        node = self.node
        self.partner = (node.leader + 1) % node.size
        self._there = node.event(owner=node.leader, waiters=[self.partner])
        self._back = node.event(owner=self.partner, waiters=[node.leader])

    def send_there(self) -> None:
        """Send the leader's signal."""
        self._there.record()

    def receive_there(self) -> None:
        """Receive the leader's signal."""
        self._there.wait()

    def send_back(self) -> None:
        """Send the partner's signal."""
        self._back.record()

    def receive_back(self) -> None:
        """Receive the partner's signal."""
        self._back.wait()

    def step(self) -> None:
        if self.node.is_leader:
            self.send_there()
            self.receive_back()
        elif self.node.rank == self.partner:
            self.receive_there()
            self.send_back()

    def checked_step(self, token: int) -> None:
        slot, words = token % _SLOTS, self.window.array
        there, back = words[0, slot], words[1, slot]
        node, pattern = self.node, self.pattern
        if node.is_leader:
            pattern.fill(there, node.leader, 0, token)
            self.send_there()
            self.receive_back()
            pattern.verify(back, self.partner, 1, token)
        elif node.rank == self.partner:
            self.receive_there()
            pattern.verify(there, node.leader, 0, token)
            pattern.fill(back, self.partner, 1, token)
            self.send_back()

    def free(self) -> None:
        self._there.close()
        self._back.close()


class _Send(_PingPong):
    """The baseline of there and back."""

    def prepare(self) -> None:
        self.partner = (self.node.leader + 1) % self.node.size
        self._word = np.zeros(1, "u8")

    def send_there(self) -> None:
        self.session.synchronize()
        self.node.comm.Send(self._word, self.partner)

    def receive_there(self) -> None:
        self.node.comm.Recv(self._word, self.node.leader)

    def send_back(self) -> None:
        self.session.synchronize()
        self.node.comm.Send(self._word, self.node.leader)

    def receive_back(self) -> None:
        self.node.comm.Recv(self._word, self.partner)

    def free(self) -> None:
        pass

"""Case ``event``: record and wait, one hop from the owner to all waiters, and there and back.

The rivals are what one writes without events: wait for the GPU, then `MPI_Bcast`, or `MPI_Send` and
`MPI_Recv`, of one word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpishare.bench.arm import Arm, Entry
from mpishare.bench.contest import contest, rivals
from mpishare.bench.pattern import Pattern

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.bench.rows import Row
    from mpishare.bench.session import Session

#: Words a rank writes in turn. A chain of checked steps is shorter, and ends with an agreement, so
#: that no word is written again before all have read it.
_SLOTS = 8


def run(session: Session) -> list[Row]:
    """Run the case and return its rows. Collective, host-blocking."""
    pattern = Pattern(session.node.xp, 1)
    alone = None
    if min(session.comm.allgather(session.node.size)) < 2:
        alone = "an event needs two ranks on every node"

    def entry(name: str, kind: Callable[[Session, Pattern], Arm], *against: str) -> Entry:
        def make() -> Arm:
            return kind(session, pattern)

        return Entry(name, make, against=against, kind="own" if against else "rival", unfit=alone)

    entries = [
        entry("hop", _Hop, "bcast"),
        entry("pingpong", _PingPong, "send"),
        *rivals(
            session,
            "event",
            {"bcast": lambda: [entry("bcast", _Bcast)], "send": lambda: [entry("send", _Send)]},
        ),
    ]
    return contest(session, "event", 0, entries)


class _Hop(Arm):
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

    def count(self, token: int) -> None:
        self.pattern.count(self.window.array[0, token % _SLOTS], self.node.leader, 0, token)

    def wrong(self) -> int:
        return self.pattern.wrong()

    def close(self) -> None:
        self._event.close()
        self.window.close()


class _Bcast(_Hop):
    """The rival of a hop."""

    def prepare(self) -> None:
        self._word = np.zeros(1, "u8")

    def step(self) -> None:
        if self.node.is_leader:
            self.session.synchronize()
        self.node.comm.Bcast(self._word, self.node.leader)

    def close(self) -> None:
        self.window.close()


class _PingPong(_Hop):
    """The leader records, one waiter waits and records, the leader waits; others look on.

    In a checked step each of the two writes a word before it records and reads the other's.
    """

    def prepare(self) -> None:
        node = self.node
        self.partner = (node.leader + 1) % node.size
        self._there = node.event(owner=node.leader, waiters=[self.partner])
        self._back = node.event(owner=self.partner, waiters=[node.leader])

    def serve(self) -> None:
        """Send the leader's signal."""
        self._there.record()

    def take(self) -> None:
        """Receive the leader's signal."""
        self._there.wait()

    def reply(self) -> None:
        """Send the partner's signal."""
        self._back.record()

    def end(self) -> None:
        """Receive the partner's signal."""
        self._back.wait()

    def step(self) -> None:
        if self.node.is_leader:
            self.serve()
            self.end()
        elif self.node.rank == self.partner:
            self.take()
            self.reply()

    def checked_step(self, token: int) -> None:
        slot, words = token % _SLOTS, self.window.array
        there, back = words[0, slot], words[1, slot]
        node, pattern = self.node, self.pattern
        if node.is_leader:
            pattern.fill(there, node.leader, 0, token)
            self.serve()
            self.end()
            pattern.count(back, self.partner, 1, token)
        elif node.rank == self.partner:
            self.take()
            pattern.count(there, node.leader, 0, token)
            pattern.fill(back, self.partner, 1, token)
            self.reply()

    def close(self) -> None:
        self._there.close()
        self._back.close()
        self.window.close()


class _Send(_PingPong):
    """The rival of there and back."""

    def prepare(self) -> None:
        node = self.node
        self.partner = (node.leader + 1) % node.size
        self._word = np.zeros(1, "u8")

    def serve(self) -> None:
        self.session.synchronize()
        self.node.comm.Send(self._word, self.partner)

    def take(self) -> None:
        self.node.comm.Recv(self._word, self.node.leader)

    def reply(self) -> None:
        self.session.synchronize()
        self.node.comm.Send(self._word, self.node.leader)

    def end(self) -> None:
        self.node.comm.Recv(self._word, self.partner)

    def close(self) -> None:
        self.window.close()

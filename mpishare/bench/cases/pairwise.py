"""Case ``pairwise``: the order between neighbors alone, with no data between start and complete.

The rivals: a message of no bytes to both neighbors after waiting for the GPU; a barrier; and, on
CUDA, the same number of bare stream memory operations in the same four batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishare.bench.arm import Arm, Entry
from mpishare.bench.cases.neighbors import PairwiseArm, ParityArm, Ring
from mpishare.bench.contest import contest, rivals

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.bench.rows import Row
    from mpishare.bench.session import Session

_READY, _DONE = 0, 1


def run(session: Session) -> list[Row]:
    """Run the case and return its rows. Collective, host-blocking."""
    ring = Ring(session, nbytes=8)
    node = session.node

    def rival(name: str, make: Callable[[], Arm]) -> list[Entry]:
        return [Entry(name, make, kind="rival")]

    def sendrecv() -> Arm:
        return _OrderOnly(ring, _exchange_nothing(ring))

    def barrier() -> Arm:
        return _OrderOnly(ring, node.comm.Barrier)

    entries = [
        Entry("pairwise", lambda: _Pairwise(ring), against=("sendrecv", "barrier", "counters")),
        *rivals(
            session,
            "pairwise",
            {
                "sendrecv": lambda: rival("sendrecv", sendrecv),
                "barrier": lambda: rival("barrier", barrier),
                "counters": lambda: rival("counters", lambda: _Counters(ring)),
            },
        ),
    ]
    return contest(session, "pairwise", 0, entries)


class _Pairwise(PairwiseArm):
    """The calls of a window; a checked step has a word between start and complete."""

    moves = False

    def step(self) -> None:
        window, peers = self.window, self.ring.peers
        window.post(peers)
        window.start(peers)
        window.complete()
        window.wait()

    def checked_step(self, token: int) -> None:
        self.fill(token)
        super().step()
        self.count(token)
        self.poison()


class _OrderOnly(ParityArm):
    """One call that orders at least the neighbors; a checked step stores a word before it."""

    moves = False

    def step(self) -> None:
        self._order()

    def checked_step(self, token: int) -> None:
        self.fill(token)
        self.move()
        self.count(token)
        self.poison()


class _Counters(PairwiseArm):
    """The four calls as bare operations: ready written, waited for, done written, waited for."""

    moves = False

    def __init__(self, ring: Ring) -> None:
        from mpishare.bench.cases.counters import Counters

        super().__init__(ring)
        self._counters = Counters(ring.session)
        batch, peers = self._counters.batch, ring.peers
        self._post, self._start = batch(peers, [], _READY), batch([], peers, _READY)
        self._complete, self._wait = batch(peers, [], _DONE), batch([], peers, _DONE)
        self._value = 0

    def step(self) -> None:
        value = self._value = self._value + 1
        self._post.enqueue(value)
        self._start.enqueue(value)
        self._complete.enqueue(value)
        self._wait.enqueue(value)

    def checked_step(self, token: int) -> None:
        value = self._value = self._value + 1
        self.fill(token)
        self._post.enqueue(value)
        self._start.enqueue(value)
        self.store()
        self._complete.enqueue(value)
        self._wait.enqueue(value)
        self.count(token)
        self.poison()

    def close(self) -> None:
        self._counters.close()
        super().close()


def _exchange_nothing(ring: Ring) -> Callable[[], None]:
    """Return a call that sends no bytes to both neighbors and receives none from each."""
    comm, left, right = ring.node.comm, ring.left, ring.right
    synchronize, nothing = ring.session.synchronize, bytearray(0)

    def exchange() -> None:
        synchronize()
        comm.Sendrecv(nothing, right, 0, nothing, left, 0)
        comm.Sendrecv(nothing, left, 1, nothing, right, 1)

    return exchange

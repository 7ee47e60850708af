"""Case ``pairwise``: the order between neighbors alone, with no data between start and complete.

The baselines: a message of no bytes to both neighbors after waiting for the GPU; a barrier; and, on
CUDA, the same number of bare stream memory operations in the same four batches.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mpishare.bench.comparison import Comparison
from mpishare.bench.problems.ring import FenceRing, PairwiseRing, Ring

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.bench.cases import Case
    from mpishare.bench.report.rows import Row
    from mpishare.bench.session import Session

_READY, _DONE = 0, 1


def run(session: Session, case: Case) -> list[Row]:
    """Run the case and return its rows. Collective, host-blocking."""
    ring = Ring(session, nbytes=8)
    ring.allocate()
    comparison = Comparison(session, case)
    comparison.add("pairwise", partial(_Pairwise, ring))
    sendrecv, barrier = _exchange_nothing(ring), session.node.comm.Barrier
    comparison.add_baselines("sendrecv", {"sendrecv": partial(_OrderOnly, ring, sendrecv)})
    comparison.add_baselines("barrier", {"barrier": partial(_OrderOnly, ring, barrier)})
    comparison.add_baselines("counters", {"counters": partial(_Counters, ring)})
    return comparison.run()


class _Pairwise(PairwiseRing):
    """The calls of a window; a checked step has a word between start and complete."""

    moves = False

    def step(self) -> None:
        window, peers = self.window, self.problem.peers
        window.post(peers)
        window.start(peers)
        window.complete()
        window.wait()

    def checked_step(self, token: int) -> None:
        self.check_around(super().step, token)


class _OrderOnly(FenceRing):
    """One call that orders at least the neighbors; a checked step stores a word before it."""

    moves = False

    def step(self) -> None:
        self.order()

    def checked_step(self, token: int) -> None:
        self.check_around(self.move, token)


class _Counters(PairwiseRing):
    """The four calls as bare operations: ready written, waited for, done written, waited for."""

    moves = False

    def __init__(self, ring: Ring) -> None:
        from mpishare.bench.baselines.counters import Counters

        super().__init__(ring)
        self._counters = Counters(ring.session)
        batch, peers = self._counters.batch, ring.peers
        self._post, self._start = batch(peers, [], _READY), batch([], peers, _READY)
        self._complete, self._wait = batch(peers, [], _DONE), batch([], peers, _DONE)
        self._value = 0

    def step(self) -> None:
        value = self._value = self._value + 1
        self._post(value)
        self._start(value)
        self._complete(value)
        self._wait(value)

    def checked_step(self, token: int) -> None:
        self.check_around(self._step_with_data, token)

    def _step_with_data(self) -> None:
        value = self._value = self._value + 1
        self._post(value)
        self._start(value)
        self.store()
        self._complete(value)
        self._wait(value)

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

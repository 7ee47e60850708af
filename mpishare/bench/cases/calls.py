"""Case ``calls``: how long the host is busy with a call of `HaloExchange.exchange`.

On CUDA a call is stream-ordered: this is the time until it returns, with a queue that is never
full, and not that of the exchange. Two neighbors and one field stand beside 26 neighbors and
sixteen fields, which take no more launches. On the host backend calls block.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mpishare.bench.cases import UPPER_BOUNDS
from mpishare.bench.cases.halo import PrivateFields, make_grid
from mpishare.bench.comparison import Comparison, Wrapper
from mpishare.bench.measure import time_batches
from mpishare.bench.problems.grid import Block
from mpishare.bench.report.rows import UPPER_BOUND
from mpishare.bench.session import do_nothing

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.bench.cases import Case
    from mpishare.bench.comparison import Variant
    from mpishare.bench.measure import BlockSize
    from mpishare.bench.report.rows import Clock, Row
    from mpishare.bench.session import Session

_BLOCKS = {
    "2 neighbors, 1 field": Block(4, (64,), naxes=1),
    "26 neighbors, 16 fields": Block(8, (), naxes=3, count=16, corners=True),
}
#: Calls in a row, few enough that the stream takes them without blocking, and how often per block.
_CALLS, _BATCHES = 100, 10


def run(session: Session, case: Case) -> list[Row]:
    """Run the case and return its rows. Collective, host-blocking."""
    comparison = Comparison(session, case, clocks=("throughput",))
    for name, block in _BLOCKS.items():
        grid, unfit = make_grid(session, block)
        make = partial(_calls, partial(PrivateFields, grid))
        comparison.add(name, make, nbytes=block.face_nbytes, unfit=unfit)
    if comparison.includes(UPPER_BOUNDS):
        from mpishare.bench.baselines.upper_bounds import graph_launch

        launch, unfit = graph_launch(session)
        make = partial(_calls, launch)
        comparison.add("graph launch", make, kind=UPPER_BOUND, unfit=unfit)
    return comparison.run()


def _calls(make: Callable[[], Variant]) -> _Calls:
    return _Calls(make())


class _Calls(Wrapper):
    """The calls of a variant, timed until they return and not until the stream is done."""

    is_calibrated = False

    def step(self) -> None:
        self.inner.step()

    def time_block(self, session: Session, clock: Clock, size: BlockSize) -> list[float]:  # noqa: ARG002
        call, samples_s = self.inner.call, []
        for _ in range(_BATCHES):
            session.line_up()
            samples_s += time_batches(call, do_nothing, 1, _CALLS)
        return samples_s

"""The two clocks, how often a timed block iterates, and the maximum over ranks."""

from __future__ import annotations

import gc
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI
    from numpy.typing import NDArray

    from mpishare.bench.report import Clock

#: How long a timed block may take where ``--iters`` does not say how often it iterates.
BLOCK_S = 0.01
_MIN_ITERS, _MAX_ITERS = 5, 1000
#: A throughput block is cut into batches, so that there is a median of them.
_BATCHES = 5


def iterations(step_s: float) -> int:
    """Return how often steps of this length fit into a timed block."""
    return min(max(int(BLOCK_S / max(step_s, 1e-9)), _MIN_ITERS), _MAX_ITERS)


def batches_of(clock: Clock, iters: int) -> tuple[int, int]:
    """Return how many batches a timed block has on a clock, and how many iterations each."""
    batches = iters if clock == "latency" else min(_BATCHES, iters)
    return batches, iters // batches


def time_batches(
    step: Callable[[], object], synchronize: Callable[[], None], batches: int, batch: int = 1
) -> list[float]:
    """Time `batches` times `batch` steps back to back, in seconds.

    A sample is the time of a batch with one synchronize, divided by its steps: from the end of the
    batch before to its end, so that no time is lost between.
    """

    def steps() -> None:
        for _ in range(batch):
            step()

    run = step if batch == 1 else steps
    stamps = [0.0] * (batches + 1)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        stamps[0] = perf_counter()
        for i in range(1, batches + 1):
            run()
            synchronize()
            stamps[i] = perf_counter()
    finally:
        if was_enabled:
            gc.enable()
    return [(after - before) / batch for before, after in pairwise(stamps)]


def max_over_ranks(comm: MPI.Intracomm, samples_s: Sequence[float]) -> NDArray[np.float64]:
    """Return the time of the slowest rank for each sample. Collective; all give as many."""
    from mpi4py import MPI

    slowest = np.array(samples_s, dtype=np.float64)
    comm.Allreduce(MPI.IN_PLACE, slowest, op=MPI.MAX)
    return slowest

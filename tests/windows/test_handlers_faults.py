"""A handler of a signal that raises early in a wait, which C spends, ends the node."""

import signal
import time

import numpy as np
import pytest

import mpishare
from tests.helpers.scenes import play
from tests.helpers.stage import Stage


def interrupted(stage: Stage, what: str) -> None:
    """Rank 1 comes while rank 0 still spins, so that the interrupted call itself ends."""

    def busy(seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    def boom(*_: object) -> None:
        raise mpishare.EpochError("of the handler")

    signal.signal(signal.SIGALRM, boom)
    node = stage.node(timeout_s=20.0)
    window, x = node.allocate_each(1, "i8", fill=0), np.zeros(1)
    total = mpishare.Allreduce(stage.world, x, node=node)
    wrong = 0

    def steps() -> None:
        nonlocal wrong
        for step in range(1, 300):
            x[0] = window.array[0] = step
            if stage.rank == 0 and step == 100:
                signal.setitimer(signal.ITIMER_REAL, 2e-4)
            if stage.rank == 1:
                busy(6e-4)
            is_ordered = True
            try:
                (window.fence if what == "fence" else lambda: total.reduce(x))()
            except mpishare.EpochError:
                is_ordered = False
                if what == "reduce":
                    x[0] = step
                    total.reduce(x)
            busy(1e-4)
            if what == "fence":
                wrong += is_ordered and int(window.segment(1 - stage.rank)[0]) != step
                window.fence()
            else:
                wrong += x[0] != stage.size * step

    stage.raises(mpishare.MpiShareError, steps)
    assert wrong == 0


@pytest.mark.parametrize("what", ["fence", "reduce"])
def test_no_number_is_wrong_behind_an_exception_of_a_handler(what):
    played = play(2, interrupted, what, shared=True)
    played.ended()

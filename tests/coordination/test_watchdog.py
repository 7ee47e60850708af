"""What the end of the watchdog leaves behind."""

from types import SimpleNamespace

import pytest

from mpishare.coordination import watchdog
from mpishare.coordination.agreement import Agreement
from mpishare.coordination.control_block import ControlBlock
from mpishare.coordination.counters import RELEASED, SLOT_WORDS
from mpishare.coordination.watchdog import Watchdog
from mpishare.memory import shared
from tests.helpers.latch import within


def fail(*_):
    raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize("place", ["_check_kernels", "answer"])
def test_streams_are_released_whatever_fails_in_the_watchdog(monkeypatch, place):
    block = ControlBlock(shared.create(ControlBlock.nbytes_for(1)), 0, 1)
    block.fill_pools(0)
    counters = block.pool.take(SLOT_WORDS)
    agreement = Agreement(block, 10.0)
    watched = Watchdog(agreement, releases=True)
    calls = {"_pending": list, "_check_kernels": int, "_check_elsewhere": int} | {place: fail}
    watched.objects = lambda: [SimpleNamespace(name="window 1", **calls)]
    if place == "answer":
        monkeypatch.setattr(watchdog, "answer", fail)
    watched.start()
    try:
        assert within(60, lambda: counters.view[0] == RELEASED)
        text = "the watchdog of rank 0 failed: ZeroDivisionError: on purpose"
        assert (str(agreement.life.failure), agreement.life.is_fatal) == (text, True)
    finally:
        watched.stop()
        block.close()

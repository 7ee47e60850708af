"""What the watchdog says of ranks for which a stream waits, and what its own end leaves behind."""

import logging
import re
import threading
from types import SimpleNamespace

import pytest

from mpishare.coordination import watchdog, where
from mpishare.coordination.agreement import Agreement
from mpishare.coordination.control_block import ControlBlock
from mpishare.coordination.counters import RELEASED, SLOT_WORDS
from mpishare.coordination.poll import STRAGGLER_S
from mpishare.coordination.watchdog import Watchdog
from mpishare.memory import shared
from tests.helpers.latch import within


@pytest.fixture
def blocks():
    made = shared.create(ControlBlock.nbytes_for(3))
    name = shared.publish(made)
    found = [
        ControlBlock(memory, rank, 3)
        for rank, memory in enumerate([made, shared.attach(name, made.nbytes)])
    ]
    yield found
    shared.forget(name)
    for block in found:
        block.close()


def test_a_straggler_is_warned_of_once_until_it_has_come(monkeypatch, caplog, blocks):
    now, pending = [0.0], [1, 2]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    agreement = SimpleNamespace(block=blocks[0], rank=0, others=(1, 2))
    watched = Watchdog(agreement, releases=True)
    item = SimpleNamespace(name="window 1", _pending=lambda: pending)
    watched.objects = lambda: [item]

    def warned_after(seconds):
        caplog.clear()
        now[0] += seconds
        with caplog.at_level(logging.WARNING, "mpishare"):
            watched._check_stragglers()
        where.answer(blocks[1], threading.get_ident())  # as its own watchdog does
        return [
            text.removeprefix("rank 0 has waited 30 s in window 1 on a stream for ")
            for text in caplog.messages
        ]

    def is_named(text):
        return re.fullmatch(r"rank 1; rank 1 is in \S*test_watchdog\.py:\d+, .*", text)

    assert warned_after(0) == []
    assert warned_after(STRAGGLER_S - 1) == []
    assert not blocks[1].is_asked()
    assert warned_after(0.9) == []
    first, then = warned_after(0.2)
    assert is_named(first)
    assert then == "rank 2; rank 2 is not running any more"
    assert warned_after(2 * STRAGGLER_S) == []
    pending.remove(1)
    assert warned_after(1) == []
    pending.append(1)
    assert warned_after(1) == []
    (again,) = warned_after(STRAGGLER_S + 1)
    assert is_named(again)


def fail(*_):
    raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize("place", ["_check_kernels", "_pause", "answer", "_after_failure"])
def test_streams_are_released_whatever_fails_in_the_watchdog(monkeypatch, place):
    block = ControlBlock(shared.create(ControlBlock.nbytes_for(1)), 0, 1)
    block.fill_pools(0)
    counters = block.pool.take(SLOT_WORDS)
    agreement = Agreement(block, 10.0)
    watched = Watchdog(agreement, releases=True)
    item = SimpleNamespace(name="window 1", _pending=list, _check_kernels=int)
    watched.objects = lambda: [item]
    if place == "_check_kernels":
        item._check_kernels = fail
    elif place == "answer":
        monkeypatch.setattr(watchdog, "answer", fail)
    else:
        works, left = getattr(watched, place), [fail]
        monkeypatch.setattr(watched, place, lambda: (left.pop() if left else works)())
    if place == "_after_failure":
        item._check_kernels = fail
    watched.start()
    try:
        assert within(5, lambda: counters.view[0] == RELEASED)
        text = "the watchdog of rank 0 failed: ZeroDivisionError: on purpose"
        assert (str(agreement.failure), agreement.is_fatal) == (text, True)
    finally:
        watched.stop()
        block.close()

"""Warnings of the watchdog about ranks for which a stream waits."""

import logging
from types import SimpleNamespace

from mpishare.coordination import watchdog
from mpishare.coordination.poll import STRAGGLER_S
from mpishare.coordination.watchdog import Watchdog


def test_a_straggler_is_warned_of_once_until_it_has_come(monkeypatch, caplog):
    now, pending = [0.0], [1, 2]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    block = SimpleNamespace(rank=0, size=3, life_address=lambda rank: rank)
    watched = Watchdog(SimpleNamespace(block=block, rank=0, others=(1, 2)), releases=True)
    item = SimpleNamespace(name="window 1", _pending=lambda: pending)
    watched.objects = lambda: [item]

    def warned_after(seconds):
        caplog.clear()
        now[0] += seconds
        with caplog.at_level(logging.WARNING, "mpishare"):
            watched._check_stragglers()
        return [text.split(" for rank ")[1] for text in caplog.messages]

    assert warned_after(0) == []
    assert warned_after(STRAGGLER_S - 1) == []
    assert sorted(warned_after(2)) == ["1 on a stream", "2 on a stream"]
    assert warned_after(2 * STRAGGLER_S) == []
    pending.remove(1)
    assert warned_after(1) == []
    pending.append(1)
    assert warned_after(1) == []
    assert warned_after(STRAGGLER_S + 1) == ["1 on a stream"]

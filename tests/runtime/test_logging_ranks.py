"""What users see of a run: lines on the logger `mpishare`, and ranges on a profiler's timeline."""

import logging
import sys
import types

import pytest

import mpishare
from mpishare.runtime import ranges
from tests.helpers.rings import ring


def test_what_is_made_is_logged_and_no_call_of_the_hot_path(node, caplog):
    with caplog.at_level(logging.DEBUG, "mpishare"):
        window = node.allocate((3, 5), dtype="f4")
        field = node.xp.zeros(6)
        halo = ring(node, field)
        total = mpishare.Allreduce(node.comm, field, node=node)
        made = [(record.name, record.getMessage()) for record in caplog.records]
        caplog.clear()
        for _ in range(2):
            halo.exchange(field)
            window.fence()
            total.reduce(field)
            total.dot(field, field)
        assert not caplog.records
        total.close()
        halo.close()
        window.close()
    assert [name for name, _ in made] == [
        f"mpishare.{name}" for name in ("window", "halo", "allreduce")
    ]
    assert "shape (3, 5), dtype float32, 60 B, of rank 0" in made[0][1]
    assert all(f"rank {peer} by {route}" in made[1][1] for peer, route in halo.routes.items())
    closed = [record.getMessage() for record in caplog.records]
    assert closed == [f"{each.name} closed" for each in (total, halo, window)]


def calls(node):
    """A window and two plans, used once, and once wrongly."""
    window = node.allocate(4)
    field = node.xp.zeros(6)
    halo = ring(node, field)
    halo.exchange(field)
    halo.start(field)
    halo.wait()
    halo.accumulate(field)
    window.fence()
    with pytest.raises(ValueError, match="exchange failed"):
        halo.exchange(field, field)
    with mpishare.Allreduce(node.comm, field, node=node) as total:
        total.reduce(field)
        total.dot(field, field)
    halo.close()
    window.close()


def test_ranges_are_pushed_and_popped_in_pairs(node, monkeypatch):
    seen = []
    tool = types.ModuleType("nvtx")
    tool.push_range, tool.pop_range = seen.append, lambda: seen.append("pop")
    monkeypatch.setitem(sys.modules, "nvtx", tool)
    monkeypatch.setattr(ranges, "find_spec", lambda name: name if name == "nvtx" else None)
    monkeypatch.setattr(ranges, "_choice", True)
    calls(node)
    halo = ["exchange", "start", "wait", "accumulate"]
    names = ["Node.allocate", "HaloExchange", *(f"HaloExchange.{call}" for call in halo)]
    names += ["Window.fence", "HaloExchange.exchange"]
    names += ["Allreduce", "Allreduce.reduce", "Allreduce.dot"]
    expected = [item for name in names for item in (f"mpishare.{name}", "pop")]
    assert seen == expected

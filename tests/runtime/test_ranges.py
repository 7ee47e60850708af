"""Ranges for a profiler: pushed and popped in pairs, and nothing at all where no tool listens."""

import logging
import sys
import types

import pytest

from mpishare.errors import UnsupportedError, warn_once
from mpishare.runtime import ranges


class Thing:
    def work(self, number, *, by=1):
        """Double it."""
        if number < 0:
            raise ValueError("negative")
        return 2 * number * by


class Tool:
    """A library by which ranges are pushed: what it saw."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def push(self, name):
        self.seen.append(f"push {name}")

    def pop(self):
        self.seen.append("pop")


def installed(monkeypatch, *names):
    """Let these libraries alone be installed."""
    monkeypatch.setattr(ranges, "find_spec", lambda name: name if name in names else None)


@pytest.fixture(autouse=True)
def silent(monkeypatch):
    """No tool, no choice, no library."""
    for name in ranges.TOOLS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ranges, "_choice", None)
    installed(monkeypatch)
    warn_once.cache_clear()


@pytest.fixture
def tool(monkeypatch):
    """The package nvtx, as a tool would see its calls."""
    tool = Tool()
    module = types.ModuleType("nvtx")
    module.push_range, module.pop_range = tool.push, tool.pop
    monkeypatch.setitem(sys.modules, "nvtx", module)
    installed(monkeypatch, "nvtx")
    return tool


def made():
    thing = Thing()
    ranges.bind(thing, "work")
    return thing


def test_without_a_tool_the_method_is_the_very_function_of_the_class(tool):
    thing = made()
    assert thing.work.__func__ is Thing.work
    assert vars(thing) == {}
    with ranges.span("Thing"):
        thing.work(1)
    assert tool.seen == []


@pytest.mark.parametrize("name", ranges.TOOLS)
def test_where_a_tool_listens_each_call_is_a_range(tool, monkeypatch, name):
    monkeypatch.setenv(name, "of the tool")
    thing = made()
    with ranges.span("Thing"):
        assert thing.work(3, by=2) == 12
    assert tool.seen == ["push mpishare.Thing", "push mpishare.Thing.work", "pop", "pop"]
    assert thing.work.__doc__ == "Double it."


@pytest.mark.parametrize(("is_listening", "choice"), [(True, False), (False, True)])
def test_the_switch_comes_before_what_listens(tool, monkeypatch, is_listening, choice):
    if is_listening:
        monkeypatch.setenv(ranges.TOOLS[0], "tool.so")
    before = made()
    ranges.enable(choice)
    for thing in (before, made()):
        thing.work(1)
    assert tool.seen == ["push mpishare.Thing.work", "pop"]  # of one of them
    ranges.enable(None)
    assert (vars(made()) != {}) is is_listening


def test_cupy_pushes_them_where_nvtx_is_not_installed(monkeypatch):
    tool = Tool()
    nvtx = types.SimpleNamespace(available=True, RangePush=tool.push, RangePop=tool.pop)
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", types.SimpleNamespace(nvtx=nvtx))
    installed(monkeypatch, "cupy")
    ranges.enable()
    made().work(1)
    assert tool.seen == ["push mpishare.Thing.work", "pop"]


def test_without_any_library_a_tool_is_warned_of_once_and_the_switch_refused(monkeypatch, caplog):
    monkeypatch.setenv(ranges.TOOLS[0], "tool.so")
    with caplog.at_level(logging.WARNING, "mpishare"):
        assert made().work.__func__ is Thing.work
        made()
    assert [record.name for record in caplog.records] == ["mpishare.ranges"]
    with pytest.raises(UnsupportedError, match="Install nvtx"):
        ranges.enable()

"""The end: closed twice, used afterwards, never closed, MPI finalized first."""

import atexit
import time
import warnings

import pytest

from tests.helpers.reporting import report
from tests.helpers.scenes import BACKENDS, play
from tests.helpers.stage import Stage, leftovers


def closed(stage: Stage) -> None:
    node = stage.node()
    window, event = node.allocate(4, fill=0.0), node.event()
    each = node.allocate_each(4)
    view = window.array
    calls = {
        "fence": window.fence,
        "post": lambda: window.post([0]),
        "start": lambda: window.start([0]),
        "complete": window.complete,
        "wait": window.wait,
        "array": lambda: window.array,
        "segment": lambda: each.segment(0),
        "record": event.record,
        "event wait": event.wait,
    }
    node_calls = {
        "barrier": node.barrier,
        "synchronize": node.synchronize,
        "allocate": lambda: node.allocate(4),
        "share": lambda: node.share([1.0]),
        "event": node.event,
        "with": lambda: node.__enter__(),
    }
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for thing in (each, event, window, window, event):
            stage.attempt(f"close {type(thing).__name__}", thing.close)
    report({"warnings": [str(each.message) for each in seen]})
    for name, call in calls.items():
        stage.attempt(name, call)
    node.barrier()  # the node itself goes on
    for _ in range(2):
        stage.attempt("close", node.close)
    for name, call in (calls | node_calls).items():
        stage.attempt(f"node closed: {name}", call)
    view += 1  # still mapped
    report({"view": view.tolist(), "calls": list(calls), "node calls": list(node_calls)})
    report({"is closed": [node.is_closed, window.is_closed, event.is_closed, each.is_closed]})
    report({"repr": [repr(thing) for thing in (node, window, event)]})
    stage.second_node(stage.world)
    del view
    report({"leftovers": leftovers()})


@pytest.mark.parametrize("backend", BACKENDS)
def test_close_twice_and_use_after_close(backend):
    played = play(2, closed, backend=backend, shared=True)
    for rank in (0, 1):
        facts = played.rank(rank)
        assert "calls" in facts, played.describe()
        for name in facts["calls"]:
            played.raised(rank, name, "ClosedError")
        for name in facts["calls"] + facts["node calls"]:
            played.raised(rank, f"node closed: {name}", "ClosedError")
        assert facts["is closed"] == [True] * 4
        assert all("closed" in text for text in facts["repr"])
        assert len(facts["view"]) == 4
        assert len(facts["warnings"]) == 1
        assert "window 1 of shape (4,)" in facts["warnings"][0]
        assert facts["leftovers"] == []
    played.worked(range(2), "close Window", "close Event", "close", "second node")
    played.ended_well()


def never_closed(stage: Stage, state: str) -> None:
    global kept
    node = stage.node()
    window, event = node.allocate(4, fill=0.0), node.event()
    each = node.allocate_each(3, dtype="c8", fill=1j)
    other = (stage.rank + 1) % stage.size
    kept = [node, window, event, each]
    if state == "views":
        kept += [window.array, each.array, each.segment(other)]
    elif state == "dropped":
        del kept, node, window, event, each
    elif state == "mid-use":
        window.fence()
        window.post([(stage.rank - 1) % stage.size])
        window.start([other])
        if node.is_leader:
            event.record()
    elif state == "closed, views kept":
        kept += [window.array, each.segment(other)]
        node.barrier()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            node.close()
    elif state == "exits far apart":
        time.sleep(0.3 * stage.rank)
    report({"done": True})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("state", "python"),
    [
        ("views", ()),
        ("views", ("-W", "error")),
        ("dropped", ("-W", "error")),
        ("mid-use", ("-W", "error")),
        ("closed, views kept", ("-W", "error")),
        ("exits far apart", ("-W", "error")),
    ],
)
def test_nothing_was_ever_closed(state, python, backend):
    played = play(3, never_closed, state, backend=backend, python=python)
    assert [played.rank(rank)["done"] for rank in range(3)] == [True] * 3
    played.ended_well()


def exit_takes_long(stage: Stage) -> None:
    # Called after mpishare's own: the watchdog's thread still runs meanwhile.
    atexit.register(time.sleep, 0.6)
    node = stage.node()
    node.allocate(4, fill=0.0)
    node.barrier()
    report({"done": True})


def test_an_exit_that_takes_long_after_mpishares_own():
    played = play(2, exit_takes_long, python=("-W", "error"))
    assert [played.rank(rank)["done"] for rank in range(2)] == [True] * 2
    played.ended_well()


def finalized(stage: Stage, closes: bool) -> None:
    node = stage.node()
    window, event = node.allocate(4, fill=7.0), node.event()
    view = window.array
    node.barrier()
    stage.MPI.Finalize()
    calls = {"fence": window.fence, "barrier": node.barrier, "allocate": lambda: node.allocate(4)}
    calls |= {"post": lambda: window.post([0]), "event": event.wait, "sync": node.synchronize}
    for name, call in calls.items():
        stage.attempt(name, call)
    report({"view": view.tolist()})
    if closes:
        for name, thing in (("window", window), ("event", event), ("node", node)):
            stage.attempt(f"close {name}", thing.close)
        stage.attempt("close again", node.close)
    time.sleep(0.3)  # the watchdog's thread goes on for a moment


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("closes", [True, False])
def test_mpi_is_finalized_before_the_node_is_closed(closes, backend):
    played = play(2, finalized, closes, backend=backend, python=("-W", "error"))
    for rank in (0, 1):
        for name in ("fence", "barrier", "allocate", "post", "event", "sync"):
            played.raised(rank, name, "ClosedError")
        assert played.rank(rank)["view"] == [7.0] * 4
        if closes:
            played.worked([rank], "close node", "close again")
    played.ended_well()

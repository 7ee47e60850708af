"""The end: nothing was ever closed, or MPI was finalized first."""

import atexit
import contextlib
import time
import warnings

import pytest

import mpishare
from tests.helpers.reporting import report
from tests.helpers.scenes import BACKENDS, play
from tests.helpers.stage import Stage


def never_closed(stage: Stage, state: str) -> None:
    global kept
    if state == "exit takes long":
        # Called after mpishare's own: the watchdog's thread still runs meanwhile.
        atexit.register(time.sleep, 0.6)
    node = stage.node()
    window, event = node.allocate(4, fill=0.0), node.event()
    each, pool = node.allocate_each(3, dtype="c8", fill=1j), node.pool()
    other = (stage.rank + 1) % stage.size
    array = pool.allocate(1000) if stage.rank == 0 else None
    handle = node.comm.bcast(pool.handle(array) if stage.rank == 0 else None)
    kept = [node, window, event, each, array, pool.open(handle) if stage.rank else pool.allocate(5)]
    node.barrier()
    if state == "views":
        kept += [window.array, each.array, each.segment(other)]
    elif state == "dropped":
        del kept, node, window, event, each, pool, array
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
        ("exit takes long", ("-W", "error")),
    ],
)
def test_nothing_was_ever_closed(state, python, backend):
    play(3, never_closed, state, backend=backend, python=python).ended_well()


def over_unseen(stage: Stage) -> None:
    node = stage.node()
    node._context.watchdog.stop()  # it looks once in a while
    life, seen = node._context.life, []
    life.at_end.append(lambda: seen.append("released"))
    life.at_exit.add(lambda: report({"seen": seen}))
    with contextlib.suppress(ZeroDivisionError), node:
        stage.leave()


def test_what_streams_wait_for_ends_with_the_process_too():
    assert play(1, over_unseen).rank(0)["seen"] == ["released"]


def finalized(stage: Stage, closes: bool) -> None:
    node = stage.node()
    window, event = node.allocate(4, fill=7.0), node.event()
    view = window.array
    node.barrier()
    stage.MPI.Finalize()
    calls = [window.fence, node.barrier, event.wait, node.synchronize]
    for call in [*calls, lambda: node.allocate(4), lambda: window.post([0])]:
        stage.raises(mpishare.ClosedError, call)
    assert view.tolist() == [7.0] * 4
    if closes:
        for each in (window, event):
            with contextlib.suppress(mpishare.ClosedError):
                each.close()
        node.close()
        node.close()
    time.sleep(0.3)  # the watchdog's thread goes on for a moment


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("closes", [True, False])
def test_mpi_is_finalized_before_the_node_is_closed(closes, backend):
    play(2, finalized, closes, backend=backend, python=("-W", "error")).ended_well()

"""A rank is late, or never comes: named at the deadline, and only then."""

import logging
import os
import re
import signal
import time

import numpy as np
import pytest

import mpishare
from mpishare.errors import late_unknown
from tests.helpers.reporting import report
from tests.helpers.scenes import BACKENDS, play
from tests.helpers.stage import CALLS, Stage

MISSING = 2
TIMEOUT_S = 2.0


def never_comes(stage: Stage, place: str, missing: int, timeout_s: float, late_s: float) -> None:
    node = stage.node(timeout_s=timeout_s)
    calls = stage.calls(node, missing)
    node.barrier()
    if stage.rank == missing:
        stage.world.Barrier()
    else:
        time.sleep(late_s * stage.rank)
        stage.attempt("call", calls[place])
        stage.world.Barrier()
        stage.attempt("then", calls["barrier"])
        stage.attempt("close", node.close)
    if stage.rank == missing:
        time.sleep(0.3)
        stage.attempt("comes at last", node.barrier)
        stage.attempt("close", node.close)
    stage.second_node(stage.world)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", CALLS)
def test_a_rank_that_never_comes_is_named_at_the_deadline(place, backend):
    """The others begin to wait 0.4 s apart: the first to give up must not be taken for it."""
    played = play(3, never_comes, place, MISSING, TIMEOUT_S, 0.4, backend=backend, shared=True)
    texts = []
    for rank in (0, 1):
        told = played.raised(rank, "call", "PeerTimeout")
        assert told.ranks == [MISSING], played.describe()
        assert told.seconds < TIMEOUT_S + 1
        texts.append(told.text)
        assert played.raised(rank, "then", "PeerTimeout").ranks == [MISSING]
        played.worked([rank], "close")
    assert played.told(0, "call").seconds >= TIMEOUT_S
    # The late one is told that it was given up.
    late = played.raised(MISSING, "comes at last", "PeerError")
    assert any(text in told for text in texts for told in late.failures.values())
    played.worked(range(3), "second node")


def no_node(stage: Stage) -> None:
    mpishare.coordination.poll.STRAGGLER_S = 0.5
    if stage.rank == 2:
        time.sleep(60)
    stage.attempt("call", mpishare.Node, timeout_s=2.0)


def test_a_rank_that_never_makes_the_node_ends_it_for_the_others():
    """They say so at the deadline, and the job ends, though the rank itself never does."""
    played = play(3, no_node)
    for rank in (0, 1):
        told = played.raised(rank, "call", "PeerTimeout")
        assert told.ranks == []
        assert 2 <= told.seconds < 3
    said = played.result.stderr
    assert played.result.returncode != 0
    assert f"aborts the job: {late_unknown('Node', 2.0)}" in said, played.describe()
    assert "s in Node: not every rank of the communicator has called it" in said, played.describe()
    assert played.result.seconds < 20


def slow(stage: Stage, way: str) -> None:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(f"{record.levelname}: {record.getMessage()}")
    logging.getLogger("mpishare").addHandler(handler)
    mpishare.coordination.poll.STRAGGLER_S = mpishare.coordination.watchdog.STRAGGLER_S = 0.5
    node = mpishare.Node()  # with the default timeout
    calls = stage.calls(node, 1)
    node.barrier()
    victim = stage.gather(os.getpid())[1]
    if way == "sleep" and stage.rank == 1:
        time.sleep(3)
    if way == "stopped in a wait":
        # Rank 1 stands still while its words say that it waits for rank 0, which comes and goes on
        # to wait for rank 1 in the next call: no cycle, since rank 1 need only look again.
        if stage.rank == 1:
            stage.attempt("stopped", node.barrier)
        elif stage.rank == 0:
            time.sleep(0.3)
            os.kill(victim, signal.SIGSTOP)
            stage.attempt("stopped", node.barrier)
        else:
            stage.attempt("stopped", node.barrier)
            time.sleep(3)
            os.kill(victim, signal.SIGCONT)
    for name in CALLS:
        if name != "start":
            stage.attempt(name, calls[name])
    stage.attempt("close", node.close)
    report({"warnings": lines})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", ["sleep", "stopped in a wait"])
def test_control_a_slow_rank_is_warned_of_and_raises_nowhere(way, backend):
    played = play(3, slow, way, backend=backend)
    if way != "sleep":
        played.worked(range(3), "stopped")
    played.worked(range(3), "fence", "event", "allocate", "barrier", "close")
    # On a busy machine making the node takes long enough for a warning, too.
    warnings = {
        rank: [
            line for line in played.rank(rank)["warnings"] if not re.search(" in Node[ :]", line)
        ]
        for rank in range(2)
    }
    late = [line for line in warnings[0] if re.search("for ranks? 1", line)]
    assert len(late) == 1, played.describe()
    assert late[0].startswith("WARNING: rank 0 has waited")
    assert warnings[1] == [], played.describe()
    played.ended_well()


def stopped(stage: Stage) -> None:
    node = stage.node(timeout_s=2.0)
    victim = stage.gather(os.getpid())[1]
    if stage.rank == 1:
        stage.attempt("barrier", node.barrier)
    else:
        time.sleep(0.3)  # rank 1 waits for rank 0
        os.kill(victim, signal.SIGSTOP)
        stage.attempt("barrier", node.barrier)
        time.sleep(2.2)
        os.kill(victim, signal.SIGCONT)
    stage.attempt("close", node.close)


def test_control_a_rank_stopped_in_a_wait_finds_what_came_meanwhile():
    """Its deadline is over when it goes on; who has come by then is not missing."""
    played = play(2, stopped, shared=True)
    played.worked([0, 1], "barrier", "close")
    played.ended_well()


def stopped_in_a_wait(stage: Stage) -> None:
    node = stage.node(timeout_s=2.0)
    window = node.allocate(4, fill=0.0)
    victim = stage.gather(os.getpid())[1]
    if stage.rank == 1:
        stage.attempt("first", lambda: (window.start([2]), window.complete()))
        stage.attempt("then", lambda: (window.start([0]), window.complete()))
    elif stage.rank == 2:
        time.sleep(0.5)  # rank 1 waits for me
        os.kill(victim, signal.SIGSTOP)
        window.post([1])  # which it does not see
        time.sleep(5)
        os.kill(victim, signal.SIGCONT)
    else:
        time.sleep(1)
        window.post([1])
        stage.attempt("wait", window.wait)
    stage.attempt("close", node.close)


def test_a_rank_that_was_stopped_is_named_and_not_whom_it_waited_for():
    """Its last words are that it waits for rank 2, which has come since and is not to blame."""
    played = play(3, stopped_in_a_wait, shared=True)
    assert played.raised(0, "wait", "PeerTimeout").ranks == [1], played.describe()


def no_plan(stage: Stage) -> None:
    node = stage.node(timeout_s=2.0)
    node.barrier()
    if stage.rank == 1:
        time.sleep(4)
    if stage.rank == 2:
        time.sleep(1.96)
    plan = mpishare.NeighborExchange
    stage.attempt("plan", lambda: plan(stage.world, {}, {}, np.zeros((4, 4)), node=node))
    stage.attempt("close", node.close)


def test_a_rank_that_has_only_just_come_is_not_missing():
    played = play(3, no_plan, shared=True)
    assert played.raised(0, "plan", "PeerTimeout").ranks == [1], played.describe()


def one_way(stage: Stage) -> None:
    os.environ["MPISHARE_ROUTE"] = "mpi"
    node = stage.node(timeout_s=2.0)
    here = {1 - stage.rank: [0]}
    sends, recvs = (here, {}) if stage.rank == 0 else ({}, here)
    # So much that it is not sent before it is asked for.
    plan = mpishare.NeighborExchange(stage.world, sends, recvs, np.zeros((2, 4 << 20)), node=node)
    plan.exchange()
    node.barrier()
    if stage.rank == 0:
        stage.attempt("exchange", plan.exchange)
    else:
        time.sleep(4)
    stage.attempt("close", node.close)


def test_a_receiver_that_never_comes_is_named_by_who_only_sends():
    played = play(2, one_way, shared=True)
    assert played.raised(0, "exchange", "PeerTimeout").ranks == [1], played.describe()


def elsewhere(stage: Stage) -> None:
    node = stage.node(timeout_s=3.0)
    pair = stage.world.Split(stage.rank == 2)
    event = node.event(owner=2)
    if stage.rank < 2:
        plan = stage.ring(node, np.zeros(4), comm=pair)
    if stage.rank == 0:
        stage.attempt("close", plan.close)
    elif stage.rank == 1:
        time.sleep(1)
        stage.attempt("wait", event.wait)
    stage.world.Barrier()


def test_a_rank_that_waits_in_another_call_is_missing():
    """Ranks of a part of the node agree by messages, whose wait knows no rank: the node does."""
    played = play(3, elsewhere, shared=True)
    for rank, call in ((0, "close"), (1, "wait")):
        # The rank for which the missing one waits.
        assert played.raised(rank, call, "PeerTimeout").ranks == [2], played.describe()

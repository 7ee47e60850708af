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
from tests.helpers.scenes import BACKENDS, LIMIT_S, play
from tests.helpers.stage import CALLS, Stage


def never_comes(stage: Stage, place: str, missing: int, timeout_s: float, late_s: float) -> None:
    node = stage.node()
    calls = stage.calls(node, missing)
    stage.hurry(node, timeout_s)
    if stage.rank == missing:
        stage.world.Barrier()
        time.sleep(0.3)
        text = " ".join(stage.raises(mpishare.PeerError, node.barrier).failures.values())
    else:
        time.sleep(late_s * stage.rank)
        begin = time.monotonic()
        told = stage.raises(mpishare.PeerTimeout, calls[place])
        assert stage.rank or time.monotonic() - begin >= timeout_s
        stage.world.Barrier()
        then = stage.raises(mpishare.PeerTimeout, calls["barrier"])
        assert told.ranks == then.ranks == (missing,)
        text = str(told)
    node.close()
    texts = stage.gather(text)
    # The late one is told that it was given up.
    assert any(text in texts[missing] for rank, text in enumerate(texts) if rank != missing)
    stage.use_another_node()
    report({"is at the end": True})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", CALLS)
def test_a_rank_that_never_comes_is_named_at_the_deadline(place, backend):
    """The others begin to wait 0.4 s apart: the first to give up must not be taken for it."""
    played = play(3, never_comes, place, 2, 2.0, 0.4, backend=backend, shared=True)
    # A job of its own is aborted at its exit, since a rank was missing.
    assert all(played.rank(rank)["is at the end"] for rank in range(3)), played.describe()


def no_node(stage: Stage) -> None:
    mpishare.coordination.poll.STRAGGLER_S = 0.5
    if stage.rank == 2:
        time.sleep(1000)
    stage.attempt("call", mpishare.Node, timeout_s=2.0)


def test_a_rank_that_never_makes_the_node_ends_it_for_the_others():
    """They say so at the deadline, and the job ends, though the rank itself never does."""
    played = play(3, no_node)
    for rank in (0, 1):
        told = played.raised(rank, "call", "PeerTimeout")
        assert told.ranks == []
        assert 2 <= told.seconds < 2 + LIMIT_S
    said = played.result.stderr
    assert played.result.returncode != 0
    assert f"aborts the job: {late_unknown('Node', 2.0)}" in said, played.describe()
    assert "s in Node: not every rank of the communicator has called it" in said, played.describe()


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
        if stage.rank == 0:
            time.sleep(0.3)
            os.kill(victim, signal.SIGSTOP)
        node.barrier()
        if stage.rank == 2:
            time.sleep(3)
            os.kill(victim, signal.SIGCONT)
    for name in CALLS:
        if name != "start":
            calls[name]()
    node.close()
    # On a busy machine making the node takes long enough for a warning, too.
    lines = [line for line in lines if not re.search(" in Node[ :]", line)]
    if stage.rank == 0:
        (late,) = [line for line in lines if re.search("for ranks? 1", line)]
        assert late.startswith("WARNING: rank 0 has waited")
    assert stage.rank != 1 or lines == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", ["sleep", "stopped in a wait"])
def test_control_a_slow_rank_is_warned_of_and_raises_nowhere(way, backend):
    play(3, slow, way, backend=backend).ended_well()


def stopped(stage: Stage) -> None:
    node = stage.node()
    victim = stage.gather(os.getpid())[1]
    stage.hurry(node, 2.0)
    if stage.rank == 1:
        node.barrier()
    else:
        time.sleep(0.3)  # rank 1 waits for rank 0
        os.kill(victim, signal.SIGSTOP)
        node.barrier()
        time.sleep(2.2)
        os.kill(victim, signal.SIGCONT)
    node.close()


def test_control_a_rank_stopped_in_a_wait_finds_what_came_meanwhile():
    """Its deadline is over when it goes on; who has come by then is not missing."""
    play(2, stopped, shared=True).ended_well()


def one_way(stage: Stage) -> None:
    os.environ["MPISHARE_ROUTE"] = "mpi"
    node = stage.node()
    here = {1 - stage.rank: [0]}
    sends, recvs = (here, {}) if stage.rank == 0 else ({}, here)
    # So much that it is not sent before it is asked for.
    field = np.zeros((2, 4 << 20))
    plan = mpishare.NeighborExchange(stage.world, sends, recvs, field, node=node)
    plan.exchange(field)
    stage.hurry(node, 2.0)
    if stage.rank == 0:
        assert stage.raises(mpishare.PeerTimeout, plan.exchange, field).ranks == (1,)
    else:
        stage.until_told("close")
    stage.attempt("close", node.close)


def test_a_receiver_that_never_comes_is_named_by_who_only_sends():
    play(2, one_way, shared=True).ended()


def elsewhere(stage: Stage) -> None:
    node = stage.node()
    pair = stage.world.Split(stage.rank == 2)
    event = node.event(owner=2)
    if stage.rank < 2:
        plan = stage.ring(node, np.zeros(4), comm=pair)
    stage.hurry(node, 3.0)
    if stage.rank < 2:
        time.sleep(stage.rank)
        told = stage.raises(mpishare.PeerTimeout, event.wait if stage.rank else plan.close)
        assert told.ranks == (2,)  # for which the missing one waits
    stage.world.Barrier()


def test_a_rank_that_waits_in_another_call_is_missing():
    """Ranks of a part of the node agree by messages, whose wait knows no rank: the node does."""
    play(3, elsewhere, shared=True).ended()

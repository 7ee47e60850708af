"""Redistributions whose ranks are killed, late, raise, or are on several nodes."""

import os
import signal
import time

import numpy as np
import pytest

import mpishare
from tests.helpers.reporting import report
from tests.helpers.scenes import play
from tests.helpers.scenes_halo import play_on
from tests.helpers.stage import Stage


def random_cases(stage: Stage) -> None:
    from tests.helpers.distributions import check_case

    seen = set()
    with stage.node() as node:
        for seed in range(30):
            with check_case(node, stage.world, seed) as plan:
                seen |= set(plan.routes.values())
    assert "mpi" in seen


@pytest.mark.parametrize("nodes", ["1 + 1", "2 + 1", "2 + 2"])
def test_random_distributions_over_nodes(nodes):
    play_on(nodes, random_cases, shared=True).ended_well()


def ends_midway(stage: Stage, how: str, after_s: float) -> None:
    """Rank 1 ends, or is stopped, at any moment of calls that read its array where it is.

    Whatever a call has returned is right, although arrays are overwritten and unmapped at once.
    """
    import itertools
    import mmap
    import subprocess
    import threading

    def raise_here(*_: object) -> None:
        raise ZeroDivisionError("the words of the leaver")

    node = stage.node()
    shape = 24 * stage.size, stage.size, 10_000
    plan = mpishare.Redistribute(stage.world, shape, 0, 1, node=node)
    right = np.arange(shape[0]).reshape(-1, 1, 1)
    rows = right[plan.source_box.slices[0]]
    counted = {"calls": 0, "wrong": 0}

    def call(step: int) -> None:
        memory = mmap.mmap(-1, int(np.prod(plan.source_shape)) * 8)
        a = np.frombuffer(memory).reshape(plan.source_shape)
        a[...] = rows + step
        if step % 2:
            plan.start(a)
        try:
            b = plan.wait() if step % 2 else plan.forward(a)
        finally:  # no rank reads it any more, or those that do are told
            a[...] = -1
        counted["calls"] += 1
        counted["wrong"] += int((b != right + step).sum())

    def until_it_fails() -> None:
        begin = time.monotonic()
        for step in itertools.count(1):
            call(step)
            assert time.monotonic() < begin + 30

    def in_node() -> None:
        with node:
            until_it_fails()

    call(0)
    if how == "stopped":
        stage.hurry(node, 2.0)
    if stage.rank == 1:
        if how == "killed":
            threading.Timer(after_s, stage.die).start()
        elif how == "raising":
            signal.signal(signal.SIGALRM, raise_here)
            signal.setitimer(signal.ITIMER_REAL, after_s)
        else:
            stop = f"sleep {after_s}; kill -STOP {os.getpid()}; sleep 4; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", stop])
    stage.attempt("first", in_node)
    report(counted)
    if how == "stopped":
        stage.world.Barrier()


@pytest.mark.parametrize("how", ["killed", "raising", "stopped"])
def test_no_wrong_cell_is_returned(how):
    is_killed = how == "killed"
    played = play(3, ends_midway, how, 0.1, survivable=is_killed, shared=not is_killed)
    for rank in (0, 2):
        told = played.rank(rank)
        assert told["calls"] > 0
        assert told["wrong"] == 0
        first = played.raised(rank, "first", "PeerError" if how == "raising" else "PeerTimeout")
        assert first.ranks == [1]
        if how == "raising":
            assert "the words of the leaver" in first.text
    if how == "stopped":
        assert played.raised(1, "first", "PeerError").ranks == [0, 2]
    if how != "killed":
        assert played.rank(1)["wrong"] == 0

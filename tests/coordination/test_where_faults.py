"""Where a late rank is: in the warning, and in the error at the deadline, by its own watchdog."""

import ctypes
import logging
import os
import re
import signal
import time

import numpy as np
import pytest

import mpishare
from tests.helpers.reporting import report
from tests.helpers.scenes import BACKENDS, play
from tests.helpers.stage import Stage

NUMPY = r" \(in numpy/\S+, \w+\)"
SILENT = (
    "silent: stopped, or inside one call that holds Python's lock, as comm.allreduce and "
    "comm.reduce of mpi4py do"
)
# What rank 1 does, and what is said of it: of a line of Python, what follows its function.
WAYS = {
    "mpi": r": stage\.world\.Barrier\(\)",
    "array": rf": while np\.sort\(.*?({NUMPY})?",
    "loop": r": .*",
    "sleep": r": time\.sleep\(5\)",
    "stopped": r"stopped by a signal \(process {victim}\)",
    "lock": re.escape(SILENT),
}


def late(stage: Stage, way: str) -> None:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("mpishare").addHandler(handler)
    node = stage.node()
    window = node.allocate(4, fill=0.0)
    numbers = np.arange(1e6)[::-1]
    victim = stage.gather(os.getpid())[1]
    mpishare.coordination.poll.STRAGGLER_S = mpishare.coordination.watchdog.STRAGGLER_S = 1.0

    def mpi() -> None:
        stage.world.Barrier()

    def array() -> None:
        while np.sort(numbers).size and time.monotonic() < end:
            continue

    def loop() -> None:
        while time.monotonic() < end:
            continue

    def sleep() -> None:
        time.sleep(5)

    def stopped() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def lock() -> None:
        ctypes.PyDLL(None).sleep(5)

    call = {each.__name__: each for each in (mpi, array, loop, sleep, stopped, lock)}[way]
    stage.hurry(node, 3.0)
    end = time.monotonic() + 5
    if stage.rank == 1:
        call()
    else:
        told = stage.raises(mpishare.PeerTimeout, lambda: (window.fence(), node.synchronize()))
        if way == "stopped":
            os.kill(victim, signal.SIGCONT)
        elif way == "mpi":
            stage.world.Barrier()
        warned = [line for line in lines if "for rank 1" in line]
        line = call.__code__.co_firstlineno + 1
        report({"warned": warned, "text": str(told), "where": told.where[1]})
        report({"ranks": [*told.where], "victim": victim, "line": line})
    stage.attempt("then", node.barrier)
    stage.attempt("close", node.close)


@pytest.mark.both_mpis
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_late_rank_says_where_it_is(way, backend):
    """Stopped or with Python's lock it cannot: then that is said."""
    played = play(2, late, way, backend=backend)
    told = played.rank(0)
    line, words = told["line"], WAYS[way].format(victim=told["victim"])
    if words[0] == ":":
        words = rf"in \S*/scene\.py:({line}|{line + 1}), late\.<locals>\.{way}{words}"
    assert told["ranks"] == [1]
    assert re.fullmatch(words, told["where"]), played.describe()
    assert f" (rank 0 of 2); rank 1 is {told['where']}. Look there" in told["text"]
    (warned,) = told["warned"]
    assert re.fullmatch(rf"rank 0 has waited 1 s in .* for rank 1; rank 1 is {words}", warned)
    if way == "mpi":  # it hears what was said of it
        assert "rank 1 is in" in played.raised(1, "then", "PeerError").text


def broken_before(stage: Stage) -> None:
    node = stage.node()
    stage.hurry(node, 2.0)
    if stage.rank == 1:
        stage.world.Barrier()
    else:
        time.sleep(0.4 * stage.rank)
        told = stage.raises(mpishare.PeerTimeout, node.barrier)
        stage.world.Barrier()
        report({"where": told.where.get(1), "text": str(told)})


def test_each_that_misses_a_rank_knows_where_it_is():
    """Also who only hears of it: the first to give up breaks the node of the late one, too."""
    played = play(4, broken_before)
    for rank in (0, 2, 3):
        told = played.rank(rank)
        assert "broken_before: stage.world.Barrier()" in told["where"], played.describe()
        assert "rank 1 is in" in told["text"]

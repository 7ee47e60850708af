"""A job that is aborted says why: nothing of it is cut off, and nobody is blamed for another."""

import os
import re
import subprocess
import sys

import pytest

from tests.helpers.launch import run_ranks

LATE = """
import time
import mpishare
from mpishare.plans.node_cache import context_of
from mpi4py import MPI

with mpishare.Node() as node:
    node.barrier()
    # Of the calls from here on: not of making the node, which takes ranks without a core as long.
    context_of(node).agreement.timeout_s = 2.0
    MPI.COMM_WORLD.Barrier()
    if node.rank == 1:
        time.sleep(1000)
    time.sleep(APART_S * node.rank)
    node.barrier()
"""


# Without the wait before the abort one in five fails. Who begins to wait later hears of the others.
@pytest.mark.parametrize("apart_s", [0, 0.001, 0.1])
def test_every_rank_says_why_it_aborts(apart_s):
    result = run_ranks(4, LATE.replace("APART_S", str(apart_s)))
    assert result.returncode != 0
    for rank in (0, 2, 3):
        said = re.search(f"mpishare: rank {rank} aborts the job: (.*)", result.stderr)
        assert said, result.describe()
        own = f"rank {rank} of 4"
        heard = r"ranks? [023, ]+ ha(s|ve) left: .*"
        why = r"rank 1 did not arrive within 2 s \({}\); rank 1 is in .*: time.sleep\(1000\)"
        words = f"Node.barrier failed: ({why.format(own)}|{heard + why.format('.*')})"
        assert re.match(words, said[1]), result.describe()


RAISES = """
import os, sys
from mpishare.tools.cli import run_on_ranks

def body(world):
    if world.rank == 1:
        raise ZeroDivisionError("on purpose")
    world.Barrier()
    return 0

os.sched_setaffinity(0, {int(sys.argv[1])})
run_on_ranks(body)
"""


@pytest.mark.parametrize("again", range(3))  # without the wait before the abort two in three fail
def test_a_program_that_raises_is_read_to_its_end(again):
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # the launcher's, which reads while the ranks go on
    try:
        result = run_ranks(2, RAISES, args=[str(max(cores))])
    finally:
        os.sched_setaffinity(0, cores)
    assert result.returncode != 0
    assert "rank 1 of 2:\n" in result.stderr, result.describe()
    assert "ZeroDivisionError: on purpose" in result.stderr


UNHEARD = """
import mpishare
from mpi4py import MPI

world, node = MPI.COMM_WORLD, mpishare.Node(timeout_s=5)
node.barrier()
if node.rank == 1:
    try:
        with node:
            raise KeyError("my own reason")
    except KeyError:
        raise SystemExit from None
world.Barrier()  # which rank 1 will never call
"""


def test_a_rank_that_leaves_while_others_wait_in_mpi_ends_the_job():
    """They make no call to mpishare in which to notice it, and MPI would wait for ever."""
    result = run_ranks(3, UNHEARD)
    assert not result.timed_out, result.describe()
    assert result.returncode != 0
    assert "rank 1 has left the node, and waits for ranks 0, 2 to notice" in result.stderr
    assert "ranks 0, 2 made no call to mpishare within 5 s" in result.stderr


BROKEN = """
import os, signal, sys, time
import mpishare
from mpishare.plans.node_cache import context_of
from mpi4py import MPI

node = mpishare.Node()
node.barrier()
context_of(node).agreement.timeout_s = 0.5  # of the next wait, for a rank that never comes
if node.rank == 1:
    time.sleep(1000)
try:
    node.barrier()
except mpishare.PeerTimeout as error:
    print(error.ranks, flush=True)
open_for_ever = MPI.COMM_WORLD.Ibarrier()
"""
LATE_NODE = """
import time
import mpishare
from mpi4py import MPI

if MPI.COMM_WORLD.rank == 1:
    time.sleep(1000)
try:
    mpishare.Node(timeout_s=1)
except mpishare.PeerTimeout:
    MPI.Finalize()
"""
ABORTS = "mpishare: rank 0 aborts the job: Node"
# How the program of a rank that was let down goes on, and what is said then.
ENDS = {
    "no reader": (BROKEN + "r, w = os.pipe(); os.dup2(w, 2); os.close(w); os.close(r)", ""),
    "closed": (BROKEN + "os.close(2)", ""),
    "none": (BROKEN + "sys.stderr = None", ""),
    # As a program under SLURM does, which turns the signal of its end into an exit.
    "a signal ends the wait before it": (
        BROKEN + "signal.signal(signal.SIGALRM, lambda *_: sys.exit(7))\nsignal.alarm(1)\n",
        f"{ABORTS}.barrier failed",
    ),
    "it finalizes MPI itself": (BROKEN + "MPI.Finalize()\n", f"{ABORTS}.barrier failed"),
    "it finalizes MPI after a late node": (LATE_NODE, f"{ABORTS} failed"),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_job_is_aborted_however_the_program_ends(end):
    program, words = ENDS[end]
    result = run_ranks(2, program)
    assert result.returncode != 0
    assert words in result.stderr, result.describe()
    assert program is LATE_NODE or result.stdout.startswith("(1,)"), result.describe()
    assert not result.timed_out, result.describe()


FULL = """
import os
from mpishare.coordination.abort import say_at_once

os.set_blocking(2, False)
for size in (65536, 1):
    try:
        while True:
            os.write(2, bytes(size))
    except BlockingIOError:
        pass
os.set_blocking(2, True)
say_at_once("rank 1 died")
print("goes on")
"""


def test_nobody_waits_for_the_reader_of_what_is_said_at_once():
    read, write = os.pipe()
    try:
        command = [sys.executable, "-c", FULL]
        said = subprocess.run(command, stdout=subprocess.PIPE, stderr=write, timeout=20, check=True)
    finally:
        os.close(read)
        os.close(write)
    assert said.stdout == b"goes on\n"

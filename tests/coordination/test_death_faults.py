"""A rank is killed: every survivor is told which one, within seconds, wherever it is."""

import ctypes
import os
import time

import pytest

import mpishare
from mpishare.errors import late_unknown
from tests.helpers.reporting import report
from tests.helpers.scenes import KILLING_BACKENDS, LIMIT_S, play
from tests.helpers.stage import CALLS, Stage

VICTIM = 1


def killed(stage: Stage, place: str, victim: int) -> None:
    rest = stage.world.Split(stage.rank == victim, stage.rank)
    node = stage.node()
    calls = stage.calls(node, victim)
    for name in CALLS:  # each works while all are there
        if name != "start":
            calls[name]()
    node.barrier()
    if stage.rank == victim:
        stage.die(0.4)
    if place == "computing":
        time.sleep(1.0)
        place = "fence"
    stage.attempt("first", calls[place])
    for name in CALLS:
        stage.attempt(f"then {name}", calls[name])
    stage.attempt("close", node.close)
    stage.attempt("close again", node.close)
    stage.second_node(rest)
    stage.end()


@pytest.mark.parametrize("backend", KILLING_BACKENDS)
@pytest.mark.parametrize(
    "place", [*CALLS[:-1], pytest.param(CALLS[-1], marks=pytest.mark.both_mpis), "computing"]
)
def test_all_survivors_name_the_killed_rank(place, backend):
    played = play(3, killed, place, VICTIM, backend=backend, survivable=True)
    died, others = played.rank(VICTIM)["died"], (0, 2)
    for first in played.missed(VICTIM, "first", of=others):
        assert max(first.end - died, first.seconds) < LIMIT_S
    for name in CALLS:
        assert all(e.seconds < LIMIT_S for e in played.missed(VICTIM, f"then {name}", of=others))
    closing = "close", "close again"
    played.worked(others, *closing, "second node")
    assert all(played.told(rank, name).seconds < LIMIT_S for rank in others for name in closing)
    assert played.result.returncode != 0, played.describe()
    assert "mpishare: rank 0 aborts the job: rank 1 of 3 died" in played.stderr[0]


def sleeping(stage: Stage, victim: int) -> None:
    stage.node().barrier()
    if stage.rank == victim:
        stage.die()
    time.sleep(1000)


@pytest.mark.both_mpis
def test_the_launcher_ends_the_job_and_one_line_names_the_killed_rank():
    """A launcher kills the survivors as soon as it learns of a death: most often after the line."""
    for _ in range(8):
        played = play(4, sleeping, VICTIM)
        assert played.result.returncode != 0, played.describe()
        lines = [line for line in played.result.stderr.splitlines() if " died" in line]
        assert lines in ([], ["mpishare: rank 1 of 4 died (seen by rank 0)"]), played.describe()
        if lines:
            return
    raise AssertionError(f"nobody said who died\n{played.describe()}")


def ending(stage: Stage, victim: int) -> None:
    """Of rank 1 the thread that watches is gone: so it is where the kernel begins to kill it."""
    from mpishare.plans.node_cache import context_of

    node = stage.node()
    node.barrier()
    if stage.rank == victim:
        exit_thread = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
        mpishare.coordination.robust_futex.wait = lambda *_: ctypes.CDLL(None).syscall(
            exit_thread, 0
        )
        block = context_of(node).agreement.block
        while block.is_here(0) or block.is_here(2):
            time.sleep(0.01)
        stage.die()
    stage.attempt("first", node.barrier)
    stage.end()


@pytest.mark.both_mpis
def test_a_rank_is_dead_as_soon_as_the_kernel_begins_to_end_it():
    """Its memory goes first, then its files and locks: by these the launcher learns of it."""
    played = play(3, ending, VICTIM, survivable=True)
    played.missed(VICTIM, "first", of=(0, 2))
    line = "mpishare: rank 1 of 3 died (seen by rank 0)\n"
    assert [words.count(line) for words in played.stderr.values()] == [1, 0, 0], played.describe()


def chained(stage: Stage) -> None:
    node = stage.node()
    window = node.allocate(8)
    node.barrier()
    if stage.rank == 2:
        stage.die(0.4)

    def wait_for_the_next() -> None:
        with node:
            window.start([stage.rank + 1])
            node.synchronize()

    stage.attempt("first", wait_for_the_next)
    stage.end()


@pytest.mark.parametrize("backend", KILLING_BACKENDS)
def test_the_dead_one_is_named_and_not_who_left_because_of_it(backend):
    """Rank 0 waits for rank 1 alone, which leaves its `with` block since rank 2 died."""
    played = play(3, chained, backend=backend, survivable=True)
    played.missed(2, "first", of=(0, 1))


def dies_in_node(stage: Stage, place: str) -> None:
    from mpishare.runtime import create

    choose = create.choose_backend

    def die_at_once(*_: object) -> None:
        stage.die()

    def choose_and_die(*arguments: object) -> None:
        choose(*arguments)
        stage.die()

    if stage.rank == 1 and place == "Split_type":
        create.choose_backend = choose_and_die
    elif stage.rank == 1 and place == "messages":
        create.ControlBlock.nbytes_for = die_at_once
    elif stage.rank == 1:
        create.NodeContext = die_at_once
    stage.attempt("node", lambda: mpishare.Node(timeout_s=5.0))


@pytest.mark.both_mpis
@pytest.mark.parametrize("place", ["Split_type", "messages", "a step"])
def test_a_death_while_the_node_is_made_ends_the_job_at_the_deadline(place):
    """Inside MPI's own collectives, which wait for ever, as at the end of the program."""
    played = play(3, dies_in_node, place, survivable=True)
    assert played.result.returncode != 0
    why = "rank 1 of 3 died" if place == "a step" else str(late_unknown("Node", 5.0))
    for rank in (0, 2):
        assert f"mpishare: rank {rank} aborts the job: " in played.stderr[rank], played.describe()
        assert why in played.stderr[rank]
    if place == "a step":
        played.missed(1, "node", of=(0, 2))


def unmarked(stage: Stage) -> None:
    import contextlib

    mpishare.coordination.robust_futex.holding = lambda _: contextlib.nullcontext()
    node = stage.node()
    node.barrier()
    if stage.rank == 1:
        stage.die()
    stage.attempt("first", node.barrier)
    time.sleep(0.3)


def test_a_death_is_seen_by_the_lock_alone():
    """As where the kernel marks no word: on another processor, or where memory ran out."""
    played = play(2, unmarked, survivable=True)
    (first,) = played.missed(1, "first", of=[0])
    assert first.end - played.rank(1)["died"] < LIMIT_S
    assert played.stderr[0].startswith("mpishare: rank 1 of 2 died (seen by rank 0)\n")


def stuck(stage: Stage) -> None:
    node = stage.node()
    node.barrier()
    if stage.rank == 1:
        stage.die(0.2)
    try:
        stage.world.recv(source=1)
    finally:
        report({"came back": True})


@pytest.mark.both_mpis
@pytest.mark.parametrize("backend", KILLING_BACKENDS)
def test_a_rank_stuck_in_a_message_ends_by_itself_where_that_is_asked_for(backend):
    asked = {"MPISHARE_EXIT_AFTER_DEATH": "1"}
    played = play(2, stuck, backend=backend, survivable=True, env=asked)
    assert "came back" not in played.result.reports.get(0, {})
    assert "rank 0 ends: rank 1 of 2 died" in played.stderr[0], played.describe()
    assert "No call to mpishare has ended here for 1 s" in played.stderr[0]


def forked(stage: Stage) -> None:
    node = stage.node()
    window = node.allocate(4, fill=0.0)
    window.fence()
    if stage.rank == 1 and os.fork() == 0:
        stage.until_told("after the death", "died")
        os._exit(0)  # without a word to MPI
    stage.attempt("after the fork", lambda: (node.barrier(), window.fence(), node.barrier()))
    if stage.rank == 1:
        stage.die()
    stage.attempt("after the death", node.barrier)


@pytest.mark.both_mpis
def test_a_forked_child_does_not_hide_its_parents_death():
    played = play(2, forked, survivable=True)
    played.worked([0, 1], "after the fork")
    played.missed(1, "after the death", of=[0])  # till then the child lives


def stream_waits(stage: Stage, dies: bool) -> None:
    import cupy

    node = stage.node(timeout_s=60.0 if dies else 2.0)
    window = node.allocate(8, fill=0.0)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        window.array[...] += 0  # a kernel is loaded at its first use, behind whatever waits

    def enqueue() -> None:
        with stream:
            window.start([1])
            window.array[...] += 1

    stage.stream_waits(node, stream, enqueue, window.fence, dies=dies)


@pytest.mark.gpu
@pytest.mark.kills
def test_a_stream_that_waits_for_a_killed_rank_is_released():
    play(2, stream_waits, True, backend="cuda", survivable=True).released(None)


@pytest.mark.gpu
def test_a_stream_that_waits_for_a_rank_that_never_posts_ends_at_the_deadline():
    play(2, stream_waits, False, backend="cuda").released(2.0)

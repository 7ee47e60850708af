"""A rank is killed, or late, in a call of a plan: every other rank names it."""

import os
import time

import numpy as np
import pytest

import mpishare
from tests.helpers.scenes import LIMIT_S, play
from tests.helpers.stage import Stage

OF_HALOS = ("exchange", "wait", "accumulate", "close of a halo", "make of a halo")
OF_HALOS += ("neighbors", "exchange by mpi", "wait by mpi", "seams", "adjoint of seams")
OF_OTHERS = ("reduce", "reduce many", "reduce a window", "dot", "close of a sum")
OF_OTHERS += ("make of a sum", "redistribute", "rows")


def killed(stage: Stage, places: tuple[str, ...]) -> None:
    stage.quiet()

    def prepare(node, comm, place):
        place, _, os.environ["MPISHARE_ROUTE"] = place.partition(" by ")
        plan, calls = stage.plan_calls(node, comm, place)
        if stage.rank == 0 and place == "wait":
            plan.start(node.xp.zeros(6))
        return calls

    stage.lose_rank_0(places, prepare)


@pytest.mark.parametrize("places", [OF_HALOS, OF_OTHERS], ids=["halos", "others"])
def test_survivors_name_the_killed_rank(places):
    play(1 + len(places), killed, places, survivable=True).survivors_name_rank_0(len(places))


def kernel_waits(stage: Stage, nbytes: int) -> None:
    import cupy

    stage.quiet()
    node = stage.node()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        field = node.allocate_each((4, nbytes), "u1", fill=0).array
        halo = stage.ring(node, field, axes=0)
        for _ in range(3):
            halo.exchange(field)
        node.synchronize(stream)
        node.barrier()
        if stage.rank == 1:
            stage.die(0.4)
        halo.exchange(field)
        stage.attempt("synchronize", node.synchronize, stream)
        # The node breaks before the kernels are told, so that they may still be under way.
        stream.synchronize()
        stage.attempt("then", halo.exchange, field)


@pytest.mark.gpu
@pytest.mark.kills
@pytest.mark.parametrize("nbytes", [8, 1 << 20])
def test_a_kernel_that_waits_for_a_killed_rank_ends(nbytes):
    """Each of the two kernels of route fused, whose waits only the abort flag ends."""
    played = play(2, kernel_waits, nbytes, backend="cuda", survivable=True)
    told = played.raised(0, "synchronize", "PeerTimeout")
    assert told.ranks == [1]
    assert told.end - played.rank(1)["died"] < LIMIT_S
    assert played.raised(0, "then", "PeerTimeout").ranks == [1]


def late(stage: Stage, place: str, missing: int, route: str = "") -> None:
    """A rank comes after the deadline to a call of a plan; also over several nodes."""
    os.environ["MPISHARE_ROUTE"] = route
    stage.quiet()
    node = stage.node()
    _, (first, then) = stage.plan_calls(node, stage.world, place)
    stage.hurry(node, 2.0)
    if stage.rank == missing:
        stage.until_told("then")
    else:
        time.sleep(0.03 * stage.rank)
        stage.attempt("call", first)
        stage.attempt("then", then)
    stage.attempt("close", node.close)


@pytest.mark.parametrize(
    ("place", "route"),
    [
        ("exchange", ""),
        ("exchange", "mpi"),
        ("make of a halo", ""),
        ("close of a halo", ""),
        ("seams", ""),
        ("reduce", ""),
        ("dot", ""),
        ("redistribute", ""),
        ("rows", ""),
        ("rows", "mpi"),
    ],
)
def test_a_rank_that_does_not_come_within_the_deadline(place, route):
    """All others give up at about the same time, and rank 3 waits for them, not for the late one.
    Each names that one all the same."""
    played = play(4, late, place, 1, route, shared=True)
    for rank in (0, 2, 3):
        told = played.raised(rank, "call", "PeerTimeout")
        assert told.seconds < 2 + LIMIT_S
        assert told.ranks == [1], played.describe()
        assert place != "exchange" or "HaloExchange 1: exchange failed: " in told.text
    assert played.told(0, "call").seconds >= 2


def left_midway(stage: Stage) -> None:
    """Rank 0 leaves between start and wait; its memory is taken by others before rank 1 sends."""
    import gc

    os.environ["MPISHARE_ROUTE"] = "mpi"
    if stage.rank == 1:  # else it sees that rank 0 has left, and may send nothing
        mpishare.coordination.watchdog.Watchdog.start = lambda self: None

    def leave() -> None:
        with stage.node() as node:
            field = np.full((6, 2000), 1.0)
            halo = stage.ring(node, field, axes=0, periods=False)
            halo.exchange(field)
            stage.world.Barrier()
            if stage.rank == 1:
                stage.world.recv(source=0, tag=7)  # rank 0 has left
            halo.start(field)
            stage.leave()

    stage.attempt("left", leave)
    if stage.rank == 0:
        gc.collect()
        mine = [np.zeros(16000, np.uint8) for _ in range(200)]
        stage.world.send(None, dest=1, tag=7)
        end = time.monotonic() + 1
        while time.monotonic() < end:
            stage.world.Iprobe(source=1, tag=999)
        assert not any(array.any() for array in mine)
    stage.world.Barrier()


def test_a_late_message_finds_the_memory_of_a_plan_that_was_left():
    play(2, left_midway).ended()


def forgets_a_call(stage: Stage) -> None:
    node, field = stage.node(), np.zeros(6)
    halo = stage.ring(node, field)
    for step in range(8 + (stage.rank == 1)):
        if stage.rank != 1 or step != 4:
            halo.exchange(field)
    if stage.rank == 0:
        error = stage.raises((mpishare.PeerError, mpishare.PeerTimeout), halo.exchange, field)
        assert error.__notes__ == ["It is call 9 of this plan: rank 1 has made 8."]


def test_how_many_calls_a_late_rank_has_made():
    play(2, forgets_a_call, survivable=True).ended()

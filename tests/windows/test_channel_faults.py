"""Channels whose other end dies, lags or leaves: the rank is named, and nobody waits for ever."""

import time

import pytest

from tests.helpers.reporting import report
from tests.helpers.scenes import BACKENDS, KILLING_BACKENDS, play
from tests.helpers.stage import Stage

TIMEOUT_S = 2.0


def killed(stage: Stage, victim: int, stops: bool) -> None:
    """Rank 0 produces; `victim` takes or sends one frame, stops to do so, and maybe dies."""
    node = stage.node(timeout_s=2.0 if stops else 60.0)
    channel = node.channel(1000, slots=2)

    def put_many() -> None:
        for value in range(200):
            with channel.put() as slot:
                slot[...] = value
        node.synchronize()

    def get_many() -> None:
        for slot in channel:
            slot.sum()
        node.synchronize()

    if stage.rank == 0:
        with channel.put() as slot:
            slot[...] = 1
    else:
        with channel.get() as slot:
            slot.sum()
    node.synchronize()
    node.barrier()
    if stage.rank == victim and stops:
        stage.world.Barrier()
        stage.attempt("close", node.close)
        return
    if stage.rank == victim:
        stage.die(0.4)
    stage.attempt("first", put_many if stage.rank == 0 else get_many)
    stage.attempt("then", channel.put if stage.rank == 0 else channel.get)
    stage.attempt("close channel", channel.close)
    stage.attempt("close", node.close)
    if stops:
        stage.world.Barrier()
    stage.end()


@pytest.mark.parametrize("backend", KILLING_BACKENDS)
@pytest.mark.parametrize("victim", [0, 1], ids=["producer", "consumer"])
def test_the_killed_end_is_named_on_every_survivor(victim, backend):
    played = play(3, killed, victim, False, backend=backend, survivable=True)
    survivors = {0, 1, 2} - {victim}
    played.survivors_name(victim, of=survivors)
    played.missed(victim, "close channel", of=survivors)


def killed_at_a_deal(stage: Stage, victim: int, holds: bool) -> None:
    """Rank 1 may hold the only slot; else it asks for none, and rank 2 waits for it elsewhere."""
    node = stage.node()
    channel = node.channel(1000, slots=1, deal=True)

    def put_many() -> None:
        while True:
            with channel.put() as slot:
                slot[...] = 1

    def get_many() -> None:
        for slot in channel:
            slot.sum()

    if stage.rank == 0 and holds:
        with channel.put() as slot:
            slot[...] = 1
    elif stage.rank == 1 and holds:
        channel.get().__enter__()
    node.barrier()
    if stage.rank == victim:
        stage.die(0.4)
    if stage.rank == 0:
        stage.attempt("first", put_many)
    else:
        stage.attempt("first", get_many if holds or victim == 0 else node.barrier)
    stage.attempt("then", node.barrier)
    stage.attempt("close", node.close)
    stage.end()


@pytest.mark.parametrize(
    ("victim", "holds"),
    [(0, False), (1, True), (1, False)],
    ids=["producer", "consumer with the slot", "consumer that does not ask"],
)
def test_the_killed_end_of_a_deal_is_named_on_every_survivor(victim, holds):
    played = play(3, killed_at_a_deal, victim, holds, survivable=True)
    played.survivors_name(victim, of={0, 1, 2} - {victim})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("victim", [0, 1], ids=["producer", "consumer"])
def test_the_end_that_lags_is_named_at_the_deadline(victim, backend):
    """The other consumer takes all it can get, and is not to blame."""
    played = play(3, killed, victim, True, backend=backend, shared=True)
    for rank in {0, 1, 2} - {victim}:
        first = played.raised(rank, "first", "PeerTimeout")
        if rank == 0 and first.ranks == [2]:
            # Ranks in turns on one GPU: the other consumer's deadline may pass first.
            assert "rank 2 has left: PeerTimeout: channel 1: get failed" in first.text
            continue
        assert first.ranks == [victim], played.describe()
        assert first.seconds < TIMEOUT_S + 2
        if rank == 0 or victim == 0:
            assert f"channel 1: {'put' if rank == 0 else 'get'}" in first.text


def stream_waits(stage: Stage, dies: bool) -> None:
    """The producer's host goes on at once; its stream waits for room."""
    import cupy

    node = stage.node(timeout_s=60.0 if dies else 2.0)
    channel = node.channel(1000, slots=2)
    stream = cupy.cuda.Stream(non_blocking=True)
    if stage.rank == 0:
        with stream, channel.put() as slot:  # a kernel is loaded at its first use
            slot[...] = 0

    def enqueue() -> None:
        begin = time.monotonic()
        for value in range(1, 10):
            with stream, channel.put() as slot:
                slot[...] = value
        report({"seconds": time.monotonic() - begin})

    stage.stream_waits(node, stream, enqueue, channel.put, dies=dies)


@pytest.mark.gpu
@pytest.mark.kills
def test_a_stream_that_waits_for_a_killed_consumer_is_released():
    play(2, stream_waits, True, backend="cuda", survivable=True).released(None)


@pytest.mark.gpu
def test_a_stream_that_waits_for_a_consumer_that_lags_ends_at_the_deadline():
    played = play(2, stream_waits, False, backend="cuda")
    assert played.rank(0)["seconds"] < 1
    assert "channel 1 waits for [1]" in played.released(TIMEOUT_S).text


def leaves(stage: Stage, leaver: int) -> None:
    def work() -> None:
        with stage.node() as node, node.channel(1000, slots=2) as channel:
            if stage.rank == 0:
                for value in range(200):
                    with channel.put() as slot:
                        slot[...] = value
                        if stage.rank == leaver and value == 20:
                            stage.leave()
                node.synchronize()
            else:
                for number, slot in enumerate(channel):
                    slot.sum()
                    if stage.rank == leaver and number == 20:
                        stage.leave()
                node.synchronize()

    stage.is_left_by(leaver, work, 5.0)
    stage.use_another_node()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("leaver", [0, 1], ids=["producer", "consumer"])
def test_an_end_that_leaves_by_an_exception_is_told_to_the_others(leaver, backend):
    play(3, leaves, leaver, backend=backend, shared=True).ended_well()

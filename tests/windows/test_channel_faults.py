"""Channels whose other end dies, lags or leaves: the rank is named, and nobody waits for ever."""

import time

import pytest

from tests.helpers.reporting import report
from tests.helpers.scenes import BACKENDS, KILLING_BACKENDS, LIMIT_S, play
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
        assert first.seconds < TIMEOUT_S + LIMIT_S
        if rank == 0 or victim == 0:
            assert f"channel 1: {'put' if rank == 0 else 'get'}" in first.text


def stream_waits(stage: Stage) -> None:
    """The producer's host goes on at once; its stream waits for room."""
    import cupy

    node = stage.node(timeout_s=2.0)
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

    stage.stream_waits(node, stream, enqueue, channel.put, dies=False)


@pytest.mark.gpu
def test_a_stream_that_waits_for_a_consumer_that_lags_ends_at_the_deadline():
    played = play(2, stream_waits, backend="cuda")
    assert played.rank(0)["seconds"] < 1
    assert "channel 1 waits for [1]" in played.released(TIMEOUT_S).text

"""Channels whose other end lags: the rank is named, and nobody waits for ever."""

import time

import pytest

from tests.helpers.reporting import report
from tests.helpers.scenes import BACKENDS, LIMIT_S, play
from tests.helpers.stage import Stage

TIMEOUT_S = 2.0


def lags(stage: Stage, late: int, timeout_s: float) -> None:
    """Rank 0 produces. Of two consumers and the producer, the late one stops after a frame."""
    node = stage.node()
    channel = node.channel(1000, slots=2)

    def put(count: int) -> None:
        for value in range(count):
            with channel.put() as slot:
                slot[...] = value
        node.synchronize()

    def get_all() -> None:
        for slot in channel:
            slot.sum()
        node.synchronize()

    if stage.rank == 0:
        put(1)
    else:
        with channel.get() as slot:
            slot.sum()
    node.barrier()
    stage.hurry(node, timeout_s)
    if stage.rank != late:
        stage.attempt("first", lambda: put(200) if stage.rank == 0 else get_all())
    stage.world.Barrier()
    stage.attempt("close", node.close)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("late", [0, 1], ids=["producer", "consumer"])
def test_the_end_that_lags_is_named_at_the_deadline(late, backend):
    """The other consumer takes all it can get, and is not to blame."""
    played = play(3, lags, late, TIMEOUT_S, backend=backend, shared=True)
    for rank in {0, 1, 2} - {late}:
        first = played.raised(rank, "first", "PeerTimeout")
        if rank == 0 and first.ranks == [2]:
            # Ranks in turns on one GPU: the other consumer's deadline may pass first.
            assert "rank 2 has left: PeerTimeout: channel 1: get failed" in first.text
            continue
        assert first.ranks == [late], played.describe()
        assert first.seconds < TIMEOUT_S + LIMIT_S
        if rank == 0 or late == 0:
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

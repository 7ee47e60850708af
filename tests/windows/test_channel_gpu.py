"""Channels on streams: slow kernels on both ends, a host that runs ahead, and no captures."""

import time

import pytest

from mpishare import UnsupportedError
from mpishare.windows.slots import AHEAD
from tests.helpers.captures import captured
from tests.helpers.latch import waits_on_host, within

TWO = pytest.mark.ranks(min=2)
FRAMES = 40


def run(node, channel, streams, slow):
    """Send the numbers of the frames, with `slow` ranks; return what each consumer has read.

    The producer works on one stream, a consumer on two in turn, and no host waits for its GPU.
    """
    import cupy

    found = cupy.full((FRAMES, 2), -1, "i8")
    work = cupy.zeros(1 << 24)

    def work_slowly():
        if node.rank in slow:
            for _ in range(10):
                cupy.add(work, 1, out=work)

    with streams[0]:
        for array in (found[0, 0], work[:1]):  # a kernel's first use waits for whatever is queued
            array[...] = array + 0
        work_slowly()
    node.xp.cuda.Device().synchronize()
    node.barrier()
    if node.rank == channel.producer:
        for number in range(FRAMES):
            with channel.put(streams[0]) as slot, streams[0]:
                work_slowly()
                slot[...] = number
    else:
        for number in range(FRAMES):
            stream = streams[number % 2]
            with channel.get(stream if number % 3 else stream.ptr) as slot, stream:
                work_slowly()
                found[number, 0] = slot[0]
                found[number, 1] = slot[-1]
    for stream in streams:
        node.synchronize(stream)
    told = node.comm.allgather(found.tolist())
    return [told[rank] for rank in channel.consumers]


@TWO
@pytest.mark.parametrize("slow", ["producer", "consumers"])
def test_slow_kernels(node, streams, slow):
    """The other end waits for them on the stream that was given."""
    channel = node.channel(1000, "i8", slots=2)
    slow_ranks = [channel.producer] if slow == "producer" else channel.consumers
    expected = [[number, number] for number in range(FRAMES)]
    found = run(node, channel, streams, slow_ranks)
    assert all(frames == expected for frames in found), found


@TWO
def test_the_producers_host_runs_ahead_and_no_further(node):
    """It enqueues 64 frames more than there is room for, and then waits, for the rank that lags."""
    channel, slow = node.channel(4, "i8", slots=2), node.size - 1
    ahead = AHEAD + 2
    if node.rank == channel.producer:
        for number in range(ahead):
            with channel.put() as slot:
                slot[...] = number
    node.barrier()
    if node.rank == channel.producer:
        with channel.put() as slot:
            slot[...] = ahead
        node.comm.send(time.monotonic(), slow, tag=2)
    else:
        if node.rank == slow:
            assert within(20, lambda: waits_on_host(node, channel.producer))
            assert not node.comm.Iprobe(source=channel.producer, tag=2)
            took = time.monotonic()
        for number in range(ahead + 1):
            with channel.get() as slot:
                assert int(slot[3]) == number
        if node.rank == slow:
            assert node.comm.recv(source=channel.producer, tag=2) >= took
    node.synchronize()
    node.barrier()


def test_capture_is_refused(node, streams):
    """At the beginning and at the end of a block; the slot is as free as before."""
    channel, stream = node.channel(4, "i8"), streams[0]
    is_producer = node.rank == channel.producer

    def block():
        return channel.put() if is_producer else channel.get()

    def enter():
        with block():
            pass

    def begin_inside():
        with block():
            stream.begin_capture()

    with stream:
        with captured(stream), pytest.raises(UnsupportedError, match="captured"):
            enter()
        try:
            with pytest.raises(UnsupportedError, match="at the end of its block"):
                begin_inside()
        finally:
            stream.end_capture()
        for number in range(3):
            with block() as slot:
                if is_producer:
                    slot[...] = number
                else:
                    assert slot.tolist() == [number] * 4
    node.synchronize(stream)
    node.barrier()


@TWO
def test_slow_streams_get_whole_frames_dealt(node, streams, cupy):
    """Each once, and more of them to the consumer that is faster."""
    channel, frames = node.channel(1000, "i8", deal=True), 60
    found = cupy.full((frames, 2), -1, "i8")
    work = cupy.zeros(1 << 22)
    taken = 0
    if node.rank == channel.producer:
        for number in range(frames):
            with streams[number % 2], channel.put() as slot:
                slot[...] = number
        channel.end()
    else:
        with streams[0]:
            for slot in channel:
                for _ in range(5 * node.rank):
                    cupy.add(work, 1, out=work)
                found[taken, 0], found[taken, 1] = slot[0], slot[-1]
                taken += 1
    for stream in streams:
        node.synchronize(stream)
    told = [each for rank in node.comm.allgather(found[:taken].tolist()) for each in rank]
    assert sorted(told) == [[number, number] for number in range(frames)]

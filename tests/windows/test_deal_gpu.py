"""Dealt frames on streams: each whole, once, and more of them to the consumer that is faster."""

import pytest


@pytest.mark.ranks(min=2)
def test_slow_streams_get_whole_frames(node, streams, cupy):
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

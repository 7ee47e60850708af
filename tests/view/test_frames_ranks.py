"""Channels with a name: a process outside the job gets every frame, or is cut off by name."""

import pytest


def put(node, channel, *values):
    if node.rank == channel.producer:
        for value in values:
            with channel.put() as slot:
                slot[...] = value


def take(node, channel, count):
    if node.rank in channel.consumers:
        for _ in range(count):
            with channel.get():
                pass


@pytest.mark.parametrize("producer", ["leader", "last"])
def test_a_viewer_gets_every_frame_from_attach_on(node, view, producer):
    rank = 0 if producer == "leader" else node.size - 1
    channel = node.channel(5, "i8", producer=rank, name="every", lag=8)
    assert channel.name == "every"
    assert "Channel 'every'" in repr(channel)
    put(node, channel, 1, 2)
    take(node, channel, 2)
    view("there = attach('every'); it = iter(there)")
    put(node, channel, *range(3, 11))
    take(node, channel, 8)
    got = "[(f.number, host(f.array)) for f in (next(it) for _ in range(%d))]"
    assert view(got % 5) == [[number, [number] * 5] for number in range(3, 8)]
    view("it = iter(there)")  # another loop goes on
    assert view(got % 1) == [[8, [8] * 5]]
    assert view("next(it).numbers") == {}
    view.raises("UnsupportedError", "there.latest()", "come one by one")
    view.raises("UnsupportedError", "there.array", "it is a channel")
    put(node, channel, 11)
    if node.rank == channel.producer:
        channel.end()
    take(node, channel, 1)
    assert view("[f.number for f in it]") == [10, 11]
    assert view("[f.number for f in there]") == []
    channel.close()


def test_frames_that_are_left_when_the_channel_closes(node, view):
    channel = node.channel(5, "i8", name="left", lag=4)
    view("there = attach('left')")
    put(node, channel, 1, 2, 3, 4)
    channel.close()
    assert view("[(f.number, host(f.array)[4]) for f in there]") == [[n, n] for n in (1, 2, 3, 4)]
    assert view("list(there)") == []


def test_a_viewer_that_is_too_slow_is_cut_off_by_name(node, view):
    channel = node.channel(5, "i8", name="slow", lag=3)
    view("there = attach('slow')")
    put(node, channel, 1, 2, 3)
    take(node, channel, 3)
    assert view("[next(iter(there)).number for _ in range(3)]") == [1, 2, 3]
    put(node, channel, *range(4, 14))
    take(node, channel, 10)
    words = "too slow: it missed 7 frames from number 4 on, of which the channel keeps 3"
    for _ in range(2):
        view.raises("ClosedError", "next(iter(there))", words)
    view("there = attach('slow')")
    put(node, channel, 14)
    take(node, channel, 1)
    assert view("next(iter(there)).number") == 14
    channel.close()


@pytest.mark.ranks(min=2)
def test_dealt_frames_are_seen_in_the_order_of_their_puts(node, view):
    channel = node.channel(2, "i8", deal=True, name="dealt-and-seen", lag=64)
    view("there = attach('dealt-and-seen')")
    if node.rank == channel.producer:
        put(node, channel, *range(40))
        channel.end()
    else:
        for _ in channel:
            pass
    assert view("[host(f.array)[1] for f in there]") == list(range(40))
    channel.close()


def test_numbers_beside_a_frame(node, view):
    import numpy as np

    window = node.allocate_each((2, 3), name="numbers", fill=1.0)
    mine = {"only_last": node.rank} if node.rank == node.size - 1 else {}
    window.snapshot(time=0.1 + node.rank, step=np.int32(7), done=False, **mine)
    view("there = attach('numbers')")
    expected = {"time": 0.1, "step": 7, "done": False, "only_last": node.size - 1}
    assert view("there.latest().numbers") == expected
    window.snapshot(other=2.5)
    assert view("(lambda f: [f.number, f.numbers])(there.latest())") == [2, {"other": 2.5}]

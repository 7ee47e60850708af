"""Channels: every consumer gets every frame, whole and in order, and no slot is used too early."""

import random
import time
import warnings

import numpy as np
import pytest

from mpishare import ClosedError, CudaError, EpochError, PeerError, UnsupportedError
from tests.helpers.latch import check_order
from tests.helpers.windows import nothing_leaked, send

TWO = pytest.mark.ranks(min=2)


def take(channel):
    """Take the next frame without a look at it, which would wait for the GPU."""
    with channel.get():
        pass


def receive(channel):
    """All elements of the next frame, which must be the same."""
    with channel.get() as slot:
        (value,) = set(slot.ravel().tolist())
    return value


@TWO
def test_consumers_cannot_write_into_a_slot_on_the_host(node):
    """Others read the same bytes; with one consumer the slot is in its own memory."""
    if node.backend == "cuda":
        pytest.skip("CuPy has no read-only arrays")
    for consumers in (None, [1]):
        channel = node.channel(2, "i8", consumers=consumers)
        if node.rank == channel.producer:
            send(channel, 7)
        if node.rank in channel.consumers:
            with channel.get() as slot, pytest.raises(ValueError, match="read-only"):
                slot[0] = 8
        channel.close()


@TWO
@pytest.mark.parametrize("last", [False, True], ids=["leader", "last"])
def test_get_waits_for_the_producers_work(node, last):
    """For its stream, and on the host for the call of `put`."""
    producer = node.size - 1 if last else 0
    channel, win = node.channel(1, producer=producer), node.allocate(1000, "i4", fill=0)
    order = {"signal": lambda: send(channel, 0), "wait": lambda: take(channel)}
    for value in range(1, 7):
        on_host = value % 2 == 0 or None
        check_order(node, win.array, producer, value=value, **order, on_host=on_host)
        node.barrier()


@TWO
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("slots", "shape", "dtype"), [(1, (), "f4"), (None, (4, 50), "c16"), (3, 7, "u2")]
)
def test_frames_with_random_delays(node, slots, shape, dtype):
    """Each is whole as long as its slot is held; the producer is never more than `slots` ahead."""
    frames, shake = 600, random.Random(node.rank)
    producer = node.size - 1
    channel = node.channel(shape, dtype, slots=slots, producer=producer)
    shape, dtype, slots = np.empty(shape).shape, np.dtype(dtype), slots or 4
    assert (channel.shape, channel.dtype, channel.slots) == (shape, dtype, slots)
    assert channel.nbytes == np.empty(shape, dtype).nbytes
    read = node.allocate_each(1, "i8", fill=0)

    def delay():
        if shake.random() < 0.04:
            time.sleep(shake.random() * 1e-3)

    if node.rank == producer:
        for number in range(1, frames + 1):
            delay()
            with channel.put() as slot:
                least = min(int(read.segment(rank)[0]) for rank in channel.consumers)
                assert least >= number - slots
                assert (slot.shape, slot.dtype) == (shape, dtype)
                slot[...] = number
                delay()
        channel.end()
    else:
        number = 0
        for slot in channel:
            number += 1
            assert (type(slot), slot.shape) == (node.xp.ndarray, shape)
            assert {*slot.ravel().tolist()} == {number}
            delay()
            assert {*slot.ravel().tolist()} == {number}
            read.array[0] = number
        assert number == frames
    node.synchronize()
    node.barrier()


@pytest.mark.ranks(min=3)
def test_some_consumers_only(node):
    """A rank that is neither may do nothing but close."""
    last = node.size - 1
    channel = node.channel(4, "i8", producer=1, consumers=[last])
    assert (channel.producer, channel.consumers) == (1, (last,))
    if node.rank == 1:
        send(channel, *range(20))
        channel.end()
    elif node.rank == last:
        assert [int(slot[3]) for slot in channel] == list(range(20))
    else:
        for call in (channel.put, channel.get, channel.end, lambda: next(iter(channel))):
            with pytest.raises(ValueError, match=rf"channel \d+: \w+ failed.*not rank {node.rank}"):
                call()
    channel.close()


@pytest.mark.parametrize("deal", [False, True], ids=["to all", "dealt"])
def test_without_consumers_the_producer_never_waits(node, deal):
    channel = node.channel((2, 0, 3), "i8", consumers=[], deal=deal)
    assert (channel.consumers, channel.nbytes) == ((), 0)
    if node.is_leader:
        send(channel, *range(100))
        channel.end()
    node.synchronize()
    node.barrier()


@TWO
def test_an_exception_in_put_sends_nothing(node):
    channel = node.channel(4, "i8", slots=2)

    def fail():
        with channel.put() as slot:
            slot[...] = -1
            raise ZeroDivisionError

    if node.rank == channel.producer:
        for value in range(1, 6):
            for _ in range(2):
                with pytest.raises(ZeroDivisionError):
                    fail()
            send(channel, value)
        with pytest.raises(ZeroDivisionError):
            fail()
        channel.end()
    else:
        assert [slot.tolist() for slot in channel] == [[value] * 4 for value in range(1, 6)]
    channel.close()


@TWO
@pytest.mark.parametrize("way", ["break", "raise", "raise in get"])
def test_a_slot_is_given_back_however_its_block_is_left(node, way):
    """With one slot, the producer could not go on else."""
    channel = node.channel(4, "i8", slots=1)

    def take_one():
        if way == "raise in get":
            with channel.get() as slot:
                raise ZeroDivisionError(int(slot[0]))
        for slot in channel:
            if way == "break":
                value = int(slot[0])
                break
            raise ZeroDivisionError(int(slot[0]))
        return value

    if node.rank == channel.producer:
        send(channel, *range(5))
    else:
        for value in range(5):
            try:
                found = take_one()
            except ZeroDivisionError as error:
                (found,) = error.args
            assert found == value
    node.synchronize()
    node.barrier()


@TWO
def test_no_slot_inside_a_slot(node):
    channel, other = node.channel(4, "i8"), node.channel(4, "i8")
    if node.rank == channel.producer:
        with channel.put() as slot:
            for call in (channel.put, channel.end):
                with pytest.raises(EpochError, match=rf"{channel.name}: \w+ failed: a slot is"):
                    call()
            send(other, 7)
            slot[...] = 5
    else:
        for slot in channel:
            for call in (channel.get, lambda: next(iter(channel))):
                with pytest.raises(EpochError, match=rf"{channel.name}: get failed: a slot is"):
                    call()
            assert receive(other) == 7
            assert slot.tolist() == [5] * 4
            break
    node.synchronize()
    node.barrier()


@TWO
@pytest.mark.parametrize("frames", [0, 1, 9])
def test_the_end(node, frames):
    channel = node.channel(4, "i8", slots=2)
    if node.rank == channel.producer:
        send(channel, *range(frames))
        channel.end()
        channel.end()
        with pytest.raises(EpochError, match="put failed: the stream was ended"):
            channel.put()
    else:
        assert [receive(channel) for _ in range(frames)] == list(range(frames))
        for _ in range(2):
            with pytest.raises(EOFError, match=rf"{channel.name}: get.*rank 0"), channel.get():
                pass
        assert list(channel) == []
    channel.close()


@TWO
def test_a_block_is_no_slot(node):
    """Calls without `with` would send nothing, and say nothing."""
    channel = node.channel(2, "i4")
    if node.rank == channel.producer:
        block, words = channel.put(), r"Write with channel\.put\(\) as slot"
        with pytest.raises(TypeError, match=words):
            block[...] = 1
        with pytest.raises(TypeError, match=r"put failed: it takes no frame"):
            channel.put(node.xp.ones(2))
        send(channel, 7)
    else:
        block, words = channel.get(), r"Write with channel\.get\(\) as slot"
        with pytest.raises(AttributeError, match=words):
            _ = block.sum
        assert receive(channel) == 7
    with pytest.raises(TypeError, match=words):
        _ = block[0]
    assert not hasattr(block, "_nothing")
    channel.close()


@pytest.mark.parametrize("frames", [2, 50])
def test_a_consumer_that_closes_is_waited_for_no_longer(node, frames):
    channel = node.channel(4, "i8", slots=2)
    if node.rank == channel.producer:
        send(channel, *range(frames))
    elif node.rank % 2:
        receive(channel)
    channel.close()


@TWO
def test_closed_inside_a_block(node):
    channel = node.channel(4, "i8")

    def close_inside(block):
        with block:
            channel.close()

    if node.rank == channel.producer:
        send(channel, 1)
        with pytest.raises(ClosedError, match="closed in its block"):
            close_inside(channel.put())
    else:
        close_inside(channel.get())
    assert channel.is_closed


@TWO
def test_a_slot_that_is_held_stays_mapped(node):
    channel = node.channel(4, "i8")
    if node.rank == channel.producer:
        with channel.put() as slot:
            slot[...] = 3
    else:
        with channel.get() as slot:
            pass
    node.synchronize()
    node.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the variable of a loop is such a slot
        channel.close()
    assert slot.tolist() == [3] * 4


def test_many_channels_leave_nothing(node):
    def cycle(value):
        channel = node.channel(100, "i8", slots=1)
        if node.rank == channel.producer:
            send(channel, value)
        elif value % 2:  # by counters that were not zeroed it would come too early
            assert receive(channel) == value
        channel.close()

    cycle(0)
    with nothing_leaked(node):
        for value in range(50):
            cycle(value)
        for _ in range(2):
            with pytest.raises((CudaError, UnsupportedError, PeerError)):
                node.channel(1 << 50, "u1")

"""Frames that are dealt: each reaches one consumer, once, and nobody who has left its loop."""

import time

import pytest

from mpishare import EpochError, MismatchError, PeerError
from tests.helpers.windows import send

TWO, THREE = pytest.mark.ranks(min=2), pytest.mark.ranks(min=3)


@TWO
@pytest.mark.parametrize("slots", [1, 2, None])
@pytest.mark.parametrize("last", [False, True], ids=["leader", "last"])
def test_every_frame_reaches_one_consumer_in_order(node, slots, last):
    channel = node.channel(
        (3, 5), "i8", slots=slots, deal=True, producer=node.size - 1 if last else 0
    )
    assert channel.deal
    assert channel.slots == (slots or 2 * (node.size - 1))
    found = []
    if node.rank == channel.producer:
        with pytest.raises(ZeroDivisionError), channel.put():
            raise ZeroDivisionError  # its slot comes back
        send(channel, *range(500))
        channel.end()
    else:
        for slot in channel:
            (value,) = set(slot.ravel().tolist())
            found.append(value)
            if value % 50 == node.rank:
                time.sleep(2e-3)
        assert list(channel) == []
    assert found == sorted(found)
    told = node.comm.allgather(found)
    assert sorted(value for values in told for value in values) == list(range(500))


@THREE
def test_nothing_is_dealt_to_a_consumer_that_left_its_loop(node):
    """It waits in a collective call meanwhile, which is no deadlock: others still ask."""
    channel, found = node.channel(1, "i8", deal=True), []
    if node.rank == channel.producer:
        begin = time.monotonic()
        send(channel, *range(10))
        while time.monotonic() - begin < 3:  # longer than it takes to find a deadlock
            send(channel, -1)
        channel.end()
    elif node.rank == 1:
        for slot in channel:
            found.append(int(slot[0]))
            break
    else:
        for slot in channel:
            found.append(int(slot[0]))
            time.sleep(0.6)
    node.barrier()
    told = [each for rank in node.comm.allgather(found) for each in rank]
    assert sorted(value for value in told if value >= 0) == list(range(10))
    assert len(node.comm.allgather(found)[1]) == 1


@TWO
def test_a_frame_that_nobody_can_take_is_an_error(node):
    channel = node.channel(4, "i8", deal=True)
    if node.rank == channel.producer:
        with pytest.raises(EpochError, match="all consumers have closed the channel"):
            send(channel, 1)
    channel.close()


@TWO
def test_a_producer_whose_consumers_all_wait_for_it_is_a_deadlock(node):
    """The rank that sees it first tells the others."""
    channel = node.channel(4, "i8", deal=True)
    is_producer = node.rank == channel.producer
    waits = (lambda: send(channel, 1)) if is_producer else node.barrier
    with pytest.raises(
        (MismatchError, PeerError), match=r"wait for each other: .* A put waits"
    ) as caught:
        waits()
    assert MismatchError in node.comm.allgather(caught.type)


def test_a_lag_is_a_number_of_frames(node):
    for lag, words in [(0, "from 1 to 4096"), (1 << 13, "from 1 to"), (1.5, "must be an int")]:
        with pytest.raises((TypeError, ValueError), match=f"lag must be.*|{words}"):
            node.channel(4, name="lagging", lag=lag)

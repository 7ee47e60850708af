"""The control block, looked at by several ranks in one process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishare.coordination.control_block import MAILBOX_NBYTES, ControlBlock, Departure, State
from mpishare.coordination.counters import RELEASED, SLOT_WORDS, CounterPool
from mpishare.memory import shared

SIZE = 3


@pytest.fixture
def blocks():
    made = shared.create(ControlBlock.nbytes_for(SIZE))
    name = shared.publish(made)
    nbytes = made.nbytes
    memories = [made, *(shared.attach(name, nbytes) for _ in range(SIZE - 1))]
    found = [ControlBlock(memory, rank, SIZE) for rank, memory in enumerate(memories)]
    found[0].name = name
    yield found
    shared.forget(name)
    for block in found:
        block.close()


def test_first_departure_stands(blocks):
    blocks[1].depart(State.LEFT, Departure("first"))
    blocks[1].depart(State.CLOSED, Departure("second"))
    assert blocks[0].state(1) is State.LEFT
    assert blocks[0].departures() == {1: ("first", (), True)}


@pytest.mark.parametrize(
    "text", ["", "é" * 2000, "\ud800" * 1000, "x" * 1_000_000, "\x00", "\U0001f600" * 500]
)
def test_any_words_and_missing_ranks_are_kept_as_far_as_they_fit(blocks, text):
    blocks[1].depart(State.LEFT, Departure(text, tuple(range(len(text)))))
    found, missing, is_cause = blocks[0].departures()[1]
    assert missing == tuple(range(len(text)))[:64]
    assert is_cause
    assert blocks[0].state(2) is State.PRESENT
    assert blocks[0].status(1) is None
    kept = text.encode(errors="replace").decode()
    assert found[:250] == kept[:250]
    assert len(found.encode()) < 1100


def test_status_that_is_being_written_is_none(blocks):
    blocks[1].begin_wait("a", [0])
    at = next(i for i in range(len(blocks[1].words)) if blocks[1].words[i] == 2)
    blocks[1].words[at] += 1
    assert blocks[0].status(1) is None


def test_a_long_status_is_cut_not_lost(blocks):
    """A plan for any fields has the dtypes of a call in its name, and those may have many names."""
    for call, ranks in (("é" * 3000, (0, 2)), ('"' * 3000, (0, 2)), ("f", range(10_000, 11_000))):
        blocks[1].begin_wait(call, ranks)
        found = blocks[0].status(1)
        assert found.awaited == (*ranks,)[:64]
        assert len(found.call) > 40 or found.call == call
        assert call.startswith(found.call)
    blocks[1].end_wait()
    assert blocks[0].status(1) is None


def test_full_boxes_do_not_touch_each_other(blocks):
    """Nor those of the last round, which a slow rank still reads."""
    for rank, block in enumerate(blocks):
        block.post_mail(1, MAILBOX_NBYTES, bytes([rank + 1]) * MAILBOX_NBYTES)
        block.post_mail(2, MAILBOX_NBYTES, bytes([rank + 101]) * MAILBOX_NBYTES)
    for rank in range(SIZE):
        for number, mark in ((1, rank + 1), (2, rank + 101)):
            mail = MAILBOX_NBYTES, bytes([mark]) * MAILBOX_NBYTES
            assert blocks[0].read_mail(rank, number, 0) == mail
        assert blocks[0].state(rank) is State.PRESENT
    start = blocks[0].pool_start
    assert not any(blocks[0].words[start:])


def test_mail_longer_than_a_box_comes_in_parts(blocks):
    data = bytes(range(256)) * (MAILBOX_NBYTES // 256) + b"the rest"
    received = b""
    for number, start in enumerate((0, MAILBOX_NBYTES), start=1):
        blocks[1].post_mail(number, len(data), data[start : start + MAILBOX_NBYTES])
        total, part = blocks[0].read_mail(1, number, start)
        assert total == len(data)
        received += part
    assert received == data
    blocks[1].post_mail(3, 2, b"")
    assert blocks[0].read_mail(1, 3, 2 * MAILBOX_NBYTES) == (2, b"")


def chunk(words):
    return memoryview(bytearray(8 * words)).cast("Q")


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4), st.integers(0, 100)), max_size=60))
def test_ranks_that_ask_in_the_same_order_get_the_same(calls):
    """And what is taken never overlaps what is held."""
    pools = [CounterPool(), CounterPool()]
    held = []
    for is_take, lines, which in calls:
        if is_take:
            for pool in pools:
                if not pool.has(lines * SLOT_WORDS):
                    pool.add(chunk(8 * SLOT_WORDS), 0)
            one, other = (pool.take(lines * SLOT_WORDS) for pool in pools)
            assert (one.chunk, one.start) == (other.chunk, other.start)
            words = {(one.chunk, one.start + word) for word in range(len(one.view))}
            assert all(words.isdisjoint(theirs) for _, _, theirs in held)
            held.append((one, other, words))
        elif held:
            one, other, _ = held.pop(which % len(held))
            pools[0].give(one)
            pools[1].give(other)


def test_release_lets_every_wait_pass_and_is_repeated_safely():
    pool = CounterPool()
    views = [chunk(SLOT_WORDS), chunk(SLOT_WORDS)]
    for view in views:
        pool.add(view, 0)
    views[0][2], views[1][5] = 7, RELEASED + 3
    pool.release_all()
    pool.release_all()
    assert views[0][2] == RELEASED + 7
    assert views[0][0] == RELEASED
    assert views[1][5] == RELEASED + 3
    # Cyclic, as a stream compares: far ahead of whatever is waited for, never behind.
    assert all(0 < (value - 5) % (1 << 64) < 1 << 63 for view in views for value in view)

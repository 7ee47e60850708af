"""Events: the owner records, the others' streams wait, and none passes early."""

import time

import pytest

from mpishare.windows.event import RING
from tests.helpers.latch import Hasty, check_order, waits_on_host, within

TWO = pytest.mark.ranks(min=2)


def others_of(node, owner):
    return tuple(rank for rank in range(node.size) if rank != owner)


def ignore_count(event):
    event._view = Hasty(event._view)


# --- held owners


@TWO
@pytest.mark.parametrize("control", [False, True], ids=["kept", "count ignored"])
@pytest.mark.parametrize("last", [False, True], ids=["leader", "last"])
def test_waiter_that_calls_first(node, last, control):
    """The owner has not yet called record: CUDA alone would take that for done.

    Nor are the counters of an event before this one taken for its own.
    """
    owner, win = node.size - 1 if last else 0, node.allocate(1000, "i4", fill=0)

    def check(event, value):
        order = {"signal": event.record, "wait": event.wait, "value": value, "on_host": True}
        check_order(node, win.array, owner, **order)

    for value in (1, 4):
        with node.event(owner=owner) as event:
            if control:
                ignore_count(event)
                with pytest.raises(AssertionError, match="other ranks read"):
                    check(event, value)
                continue
            for step in range(3):
                check(event, value + step)
                node.barrier()


@TWO
@pytest.mark.parametrize("control", [False, True], ids=["kept", "wait taken out"])
def test_waiter_waits_for_the_owners_work(node, monkeypatch, control):
    """Record was called, but the owner's stream is held; on the host both are one."""
    event, win = node.event(), node.allocate(1000, "i4", fill=0)
    if control:
        if node.backend == "host":
            ignore_count(event)
        monkeypatch.setattr(node._context.backend, "wait_event", lambda event, stream: None)

    def check(**keywords):
        check_order(node, win.array, 0, signal=event.record, wait=event.wait, **keywords)

    if control:
        with pytest.raises(AssertionError, match=r"passed while|other ranks read"):
            check(patience_s=5)
    else:
        for value in range(1, 4):
            check(value=value)


# --- the ring


@TWO
def test_records_and_waits_in_turn(node):
    """Two events, one each way, far more often than the ring has places."""
    win = node.allocate(10, "i8", fill=0)
    ready, taken = node.event(owner=0, waiters=[1]), node.event(owner=1, waiters=[0])
    for step in range(1, 3 * RING):
        if node.rank == 0:
            win.array[...] = step
            ready.record()
            taken.wait()
        elif node.rank == 1:
            ready.wait()
            found = win.array.tolist()
            taken.record()
            assert found == [step] * 10


@TWO
def test_record_blocks_while_a_waiter_lags(node):
    event, slow = node.event(), node.size - 1
    if node.is_leader:
        for _ in range(RING + 1):
            event.record()  # the last one blocks until rank `slow` has taken the first
        node.comm.send(time.monotonic(), slow, tag=2)
    elif node.rank == slow:
        assert within(20, lambda: waits_on_host(node, 0))
        waited_for = node._context.agreement.block.status(0).awaited
        assert waited_for == (slow,) or node.size > 2
        assert not node.comm.Iprobe(source=0, tag=2)
        took = time.monotonic()
        event.wait()
        assert node.comm.recv(source=0, tag=2) >= took
        for _ in range(RING):
            event.wait()
    else:
        for _ in range(RING + 1):
            event.wait()
    node.barrier()


@pytest.mark.ranks(min=3)
def test_some_waiters_only(node):
    """The others take no part: record never waits for them."""
    event = node.event(owner=1, waiters=[node.size - 1])
    assert (event.owner, event.waiters) == (1, (node.size - 1,))
    for _ in range(2 * RING + 3):
        if node.rank == 1:
            event.record()
        elif node.rank == node.size - 1:
            event.wait()
    if node.rank == 0:
        with pytest.raises(ValueError, match="not one of the waiters"):
            event.wait()
    node.synchronize()
    node.barrier()


def test_nobody_waits(node):
    event = node.event(waiters=[])
    assert event.waiters == ()
    if node.is_leader:
        for _ in range(3 * RING):
            event.record()
    else:
        with pytest.raises(ValueError, match="not one of the waiters"):
            event.wait()
    node.barrier()


def test_is_done_before_and_after_a_record(node):
    """True before the first one; each rank speaks of the record that it called or took itself."""
    event = node.event()
    assert event.is_done
    node.barrier()
    for _ in range(2 * RING + 3):
        (event.record if node.is_leader else event.wait)()
        node.synchronize()
        assert event.is_done


@TWO
def test_is_done_on_a_waiter_that_lags(node):
    """The owner is as far ahead as it may be: the record that the waiter took keeps its place."""
    event = node.event()
    if node.is_leader:
        for _ in range(RING + 1):
            event.record()
    else:
        event.wait()
        node.synchronize()
        assert event.is_done
    node.barrier()
    if not node.is_leader:
        assert event.is_done
        for _ in range(RING):
            event.wait()
    node.synchronize()
    node.barrier()


@pytest.mark.ranks(min=3)
def test_is_done_on_a_rank_that_takes_no_part(node):
    event = node.event(owner=0, waiters=[1])
    if node.rank >= 2:
        with pytest.raises(ValueError, match=f"rank {node.rank} is neither the owner 0 nor"):
            event.is_done  # noqa: B018
    else:
        assert event.is_done


@TWO
def test_many_events_at_once(node):
    """One of each rank, for all others."""
    events = [node.event(owner=rank) for rank in range(node.size)]
    win = node.allocate_each(2, "i8", fill=0)
    for step in range(1, 11):
        win.array[...] = step
        events[node.rank].record()
        for rank in others_of(node, node.rank):
            events[rank].wait()
            assert int(win.segment(rank)[1]) == step
        win.fence()


# --- misuse, the end


def test_only_the_owner_records(node):
    owner = node.size - 1
    event = node.event(owner=owner)
    assert event.waiters == others_of(node, owner)
    wrong = event.wait if node.rank == owner else event.record
    with pytest.raises(ValueError, match=event.name):
        wrong()
    (event.record if node.rank == owner else event.wait)()
    node.synchronize()

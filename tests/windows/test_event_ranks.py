"""Events: the owner records, the others' streams wait, and none passes early."""

import pytest

from tests.helpers.latch import check_order

MANY = 40
TWO = pytest.mark.ranks(min=2)


def others_of(node, owner):
    return tuple(rank for rank in range(node.size) if rank != owner)


@TWO
@pytest.mark.parametrize("on_host", [True, None], ids=["that calls first", "of the owner's work"])
@pytest.mark.parametrize("last", [False, True], ids=["leader", "last"])
def test_a_waiter_waits(node, last, on_host):
    """First the owner has not yet called record, which CUDA alone would take for done.

    Nor are the counters of an event before this one taken for its own.
    """
    owner, win = node.size - 1 if last else 0, node.allocate(1000, "i4", fill=0)
    for value in (1, 4):
        with node.event(owner=owner) as event:
            order = {"signal": event.record, "wait": event.wait, "on_host": on_host}
            for step in range(3):
                check_order(node, win.array, owner, **order, value=value + step)
                node.barrier()


@TWO
def test_records_and_waits_in_turn(node):
    """Two events, one each way, again and again."""
    win = node.allocate(10, "i8", fill=0)
    ready, taken = node.event(owner=0, waiters=[1]), node.event(owner=1, waiters=[0])
    for step in range(1, MANY):
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
def test_record_waits_for_no_waiter_and_none_of_them_is_lost(node):
    event, win = node.event(), node.allocate(1, "i8", fill=0)
    if node.is_leader:
        for step in range(1, MANY + 1):
            win.array[...] = step
            event.record()
    node.barrier()
    if not node.is_leader:
        for _ in range(MANY):
            event.wait()
    node.synchronize()
    assert int(win.array[0]) == MANY
    assert event.is_done
    node.barrier()


@pytest.mark.ranks(min=3)
def test_some_waiters_only(node):
    """The others take no part: record never waits for them."""
    event = node.event(owner=1, waiters=[node.size - 1])
    assert (event.owner, event.waiters) == (1, (node.size - 1,))
    for _ in range(MANY):
        if node.rank == 1:
            event.record()
        elif node.rank == node.size - 1:
            event.wait()
    if node.rank == 0:
        with pytest.raises(ValueError, match="not one of the waiters"):
            event.wait()
        with pytest.raises(ValueError, match="rank 0 is neither the owner 1 nor"):
            event.is_done  # noqa: B018
    node.synchronize()
    assert node.rank not in (1, node.size - 1) or event.is_done
    node.barrier()


def test_is_done_before_and_after_a_record(node):
    """True before the first one; each rank speaks of the record that it called or took itself."""
    event = node.event()
    assert event.is_done
    node.barrier()
    for _ in range(MANY):
        (event.record if node.is_leader else event.wait)()
        node.synchronize()
        assert event.is_done


def test_only_the_owner_records(node):
    owner = node.size - 1
    event = node.event(owner=owner)
    assert event.waiters == others_of(node, owner)
    wrong = event.wait if node.rank == owner else event.record
    with pytest.raises(ValueError, match=event.name):
        wrong()
    (event.record if node.rank == owner else event.wait)()
    node.synchronize()

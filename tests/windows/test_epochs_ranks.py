"""Order by counters: fences and pairs. The producer is held; without the wait each check fails."""

import random
import time

import pytest

from mpishare import EpochError
from mpishare.plans.node_cache import context_of
from mpishare.runtime import context
from tests.helpers.latch import check_order

TWO = pytest.mark.ranks(min=2)


@pytest.fixture(params=["flat", "rounds"])
def fence_kind(request, node, monkeypatch):
    """Fences that wait for all at once, and in rounds as where there are more ranks."""
    made = vars(context_of(node))
    made.pop("fence_rounds", None)
    if request.param == "rounds":
        monkeypatch.setattr(context, "RADIX", 2)  # on the host
        monkeypatch.setattr(context, "_FLAT_RANKS", 1)  # on streams
    yield request.param
    made.pop("fence_rounds", None)


@TWO
def test_who_does_not_wait_is_found(node):
    """The negative control of all tests that use `check_order`."""
    win = node.allocate(1000, "i4", fill=0)
    idle = {"signal": int, "wait": int, "finish": win.fence}
    with pytest.raises(AssertionError, match=r"passed while|other ranks read"):
        check_order(node, win.array, 0, **idle, patience_s=5)


@TWO
@pytest.mark.parametrize("last", [False, True], ids=["leader", "last"])
def test_fence_waits_for_a_held_rank(fence_kind, node, last):
    win = node.allocate(1000, "i4", fill=0)
    order = {"signal": win.fence, "wait": win.fence, "finish": win.fence}
    for step in range(1, 4):
        producer = (node.size - 1 if last else 0) if step == 1 else step % node.size
        check_order(node, win.array, producer, **order, value=step)


@TWO
def test_start_waits_for_a_held_post(node):
    """The target writes and then posts; the origins read after their start."""
    win = node.allocate_each(1000, "i4", fill=0)
    target = node.size - 1
    origins = [rank for rank in range(node.size) if rank != target]

    def finish():
        if node.rank == target:
            win.wait()
        else:
            win.complete()
        node.synchronize()

    check_order(
        node,
        win.segment(target),
        target,
        signal=lambda: win.post(origins),
        wait=lambda: win.start([target]),
        finish=finish,
    )


@TWO
def test_wait_waits_for_a_held_complete(node):
    """The targets post; the origin writes and completes; the targets read after their wait."""
    win = node.allocate(1000, "i4", fill=0)
    origin = node.size - 1
    targets = [rank for rank in range(node.size) if rank != origin]
    check_order(
        node,
        win.array,
        origin,
        prepare=lambda: win.start(targets) if node.rank == origin else win.post([origin]),
        signal=win.complete,
        wait=win.wait,
        finish=node.synchronize,
    )


@pytest.mark.ranks(min=3)
def test_wait_waits_for_each_origin(node):
    """All origins but one have completed: the target still waits."""
    win = node.allocate(100, "i4", fill=0)
    held, target = node.size - 1, 0
    quick = range(1, held)

    def prepare():
        if node.rank == target:
            win.post(range(1, node.size))
        else:
            win.start([target])
        if node.rank in quick:
            win.complete()

    # Those that are quick have nothing to wait for: they see the data after the target does.
    def wait():
        if node.rank == target:
            win.wait()
        win.fence()

    def signal():
        win.complete()
        win.fence()

    check_order(
        node, win.array, held, prepare=prepare, signal=signal, wait=wait, finish=node.synchronize
    )


@pytest.mark.parametrize("radix", [None, 2])
@pytest.mark.parametrize("code", ["compiled", "Python", "some of both"])
def test_fences_in_python_and_in_compiled_code(host_node, monkeypatch, code, radix):
    """They use the same words, so that a rank without a compiler works with the others."""
    node = host_node
    monkeypatch.setattr(context, "RADIX", radix or context.RADIX)
    monkeypatch.delitem(vars(context_of(node)), "fence_rounds", raising=False)
    if code == "compiled" and node.report().native_missing:
        pytest.skip(f"nothing is compiled: {node.report().native_missing}")
    if code == "Python" or (code == "some of both" and node.rank % 2):
        monkeypatch.setattr(context_of(node), "compiled", None)
    shake = random.Random(node.rank)
    win = node.allocate_each(1, "i8", fill=0)
    for step in range(1, 401):
        if shake.random() < 0.01:
            time.sleep(shake.random() * 4e-3)  # longer than compiled code looks by itself
        win.array[0] = step
        win.fence()
        assert [int(win.segment(rank)[0]) for rank in range(node.size)] == [step] * node.size
        win.fence()


def test_empty_groups_pass_at_once(node):
    """Nobody else calls anything: rank 0 waits for nobody."""
    win = node.allocate_each(3, "i4", fill=0)
    if node.rank == 0:
        for _ in range(5):
            win.post([])
            win.start([])
            win.complete()
            win.wait()
        node.synchronize()
    node.barrier()


@TWO
def test_groups_that_change(node):
    """The counts are kept for each pair, whoever else is in the group."""
    win = node.allocate_each(node.size, "i8", fill=-1)
    shake = random.Random(5)  # the same on all ranks
    for step in range(25):
        pairs = [
            (origin, target)
            for origin in range(node.size)
            for target in range(node.size)
            if shake.random() < 0.5
        ]
        win.post([origin for origin, target in pairs if target == node.rank])
        targets = [target for origin, target in pairs if origin == node.rank]
        win.start(targets)
        for target in targets:
            win.segment(target)[node.rank] = 100 * step + node.rank
        win.complete()
        win.wait()
        for origin, target in pairs:
            if target == node.rank:
                assert int(win.array[origin]) == 100 * step + origin


def test_calls_in_the_wrong_order(node):
    win = node.allocate_each(2)
    for call in (win.post, win.start):
        for wrong in ([-1], [99], [0, 0], ["0"]):
            with pytest.raises((TypeError, ValueError), match=win.name):
                call(wrong)
    with pytest.raises(EpochError, match="complete failed: no access"):
        win.complete()
    with pytest.raises(EpochError, match="wait failed: nothing is exposed"):
        win.wait()
    win.post([node.rank])
    with pytest.raises(EpochError, match="post failed: the exposure"):
        win.post([])
    with pytest.raises(EpochError, match="complete failed"):
        win.complete()
    win.start([node.rank])
    with pytest.raises(EpochError, match="start failed: the access"):
        win.start([node.rank])
    win.complete()
    with pytest.raises(EpochError):
        win.complete()
    win.wait()
    with pytest.raises(EpochError):
        win.wait()
    # None of these errors has counted.
    win.post([node.rank])
    win.start([node.rank])
    win.complete()
    win.wait()
    win.fence()

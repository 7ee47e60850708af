"""Streams: whose they are, when they change, and what may not be captured."""

import threading
import time
from types import SimpleNamespace

import pytest

from mpishare import UnsupportedError
from mpishare.runtime import stream_chain
from tests.helpers.captures import captured
from tests.helpers.latch import Latch, check_order, within

TWO = pytest.mark.ranks(min=2)
FORMS = ["cupy", "int", "method", "attribute", "cuda_stream", "torch"]


def as_form(stream, form):
    """The same stream, as other libraries would name it."""
    if form == "torch":
        torch = pytest.importorskip("torch")
        return torch.cuda.ExternalStream(stream.ptr)
    return {
        "cupy": stream,
        "int": stream.ptr,
        "method": SimpleNamespace(__cuda_stream__=lambda: (0, stream.ptr)),
        "attribute": SimpleNamespace(__cuda_stream__=(0, stream.ptr)),
        "cuda_stream": SimpleNamespace(cuda_stream=stream.ptr),
    }[form]


@TWO
@pytest.mark.parametrize("form", FORMS)
def test_stream_in_every_form(node, form, cupy):
    """The stream that is given counts, not the current one."""
    win, event = node.allocate(1000, "i4", fill=0), node.event()
    other = cupy.cuda.Stream(non_blocking=True)

    def on_given(call):
        def run():
            given = as_form(cupy.cuda.get_current_stream(), form)
            with other:
                call(stream=given)

        return run

    fence = on_given(win.fence)
    check_order(node, win.array, 0, signal=fence, wait=fence, finish=win.fence, value=1)
    check_order(
        node,
        win.array,
        0,
        signal=on_given(event.record),
        wait=on_given(event.wait),
        finish=node.synchronize,
        value=2,
    )


@TWO
@pytest.mark.parametrize("kind", ["null", "per thread", "blocking", "non-blocking"])
def test_kinds_of_streams(node, kind, cupy):
    stream = {
        "null": lambda: cupy.cuda.Stream.null,
        "per thread": lambda: cupy.cuda.Stream.ptds,
        "blocking": cupy.cuda.Stream,
        "non-blocking": lambda: cupy.cuda.Stream(non_blocking=True),
    }[kind]()
    win = node.allocate_each(100, "i8", fill=0)
    with stream:
        for step in range(1, 11):
            win.array[...] = 10 * step + node.rank
            win.fence()
            found = [int(win.segment(rank)[99]) for rank in range(node.size)]
            assert found == [10 * step + rank for rank in range(node.size)]
            win.fence()
    node.synchronize(stream)


@pytest.mark.parametrize("control", [False, True], ids=["kept", "not followed"])
@pytest.mark.parametrize("what", ["window", "event"])
def test_a_new_stream_waits_for_the_last_one(node, monkeypatch, streams, what, control):
    """The first call's stream is held: the second one's must not come to its end."""
    first, second = streams
    if control:
        monkeypatch.setattr(stream_chain.StreamChain, "_follow", lambda self, handle: None)
    win, event = node.allocate(2), node.event(owner=node.size - 1, waiters=[])
    if what == "window":
        calls = [lambda stream: win.post([], stream), lambda stream: win.start([], stream)]
    elif event.owner == node.rank:
        calls = [event.record, event.record]
    else:
        calls = [lambda stream: None] * 2
    with Latch() as latch:
        latch.hold(first.ptr)
        calls[0](first)
        calls[1](second)
        passed = within(5 if control else 0.03, lambda: second.done)
        latch.release()
        node.synchronize(first)
        node.synchronize(second)
    has_calls = what == "window" or event.owner == node.rank
    assert passed == (control or not has_calls)


@TWO
def test_a_call_that_names_nobody_on_a_stream_that_may_go(node, streams):
    """There is nothing on it to be followed, whoever destroys it."""
    win = node.allocate_each(1, "i8", fill=0)
    here, there = (stream.ptr for stream in streams)
    everyone = range(node.size)
    for number in (here, here, there):
        win.post([], number)
        win.start([], here)
        win.complete(there)
        win.wait(here)
    win.post(everyone, here)
    win.start(everyone, there)
    win.complete(there)
    win.wait(here)
    node.synchronize(here)


def test_stream_that_is_dropped_between_calls(node, cupy):
    """Its work is still waited for, though nobody but the window holds it."""
    win = node.allocate_each(1000, "i8", fill=0)
    for step in range(1, 21):
        with cupy.cuda.Stream(non_blocking=True):
            win.fence()  # after what was put on the stream that is gone
            win.array[...] = step
            win.fence()
    win.fence()
    assert {int(win.segment(rank)[0]) for rank in range(node.size)} == {20}
    win.fence()


def test_capture_is_refused(node, streams):
    win, event, pool = node.allocate_each(2, name="captured"), node.event(), node.pool()
    stream = streams[0]
    mine = [node.rank]
    with stream:
        with captured(stream):
            calls = [win.fence, lambda: win.post(mine), lambda: win.start(mine), win.snapshot]
            calls.append(lambda: pool.allocate(3) if node.is_leader else pool.open(b""))
            calls.append(event.record if event.owner == node.rank else event.wait)
            for call in calls:
                with pytest.raises(UnsupportedError, match="captured"):
                    call()
        win.post(mine)
        win.start(mine)
        win.complete()
        win.wait()
        win.fence()
        (event.record if event.owner == node.rank else event.wait)()
    node.synchronize(stream)


def test_synchronize_waits_for_its_stream_alone(node, streams):
    held, free = streams
    with Latch() as latch:
        latch.hold(held.ptr)
        node.synchronize(free)
        assert not held.done
        timer = threading.Timer(0.1, latch.release)
        begin = time.monotonic()
        timer.start()
        node.synchronize(held)
        assert time.monotonic() - begin > 0.09
        assert held.done
        timer.join()


def test_is_done_while_the_owners_stream_is_held(node, streams):
    """False on every rank until the work before the record is over; no call of it waits."""
    event, stream = node.event(), streams[0]
    with Latch() as latch, stream:
        (event.record if node.is_leader else event.wait)()
        node.synchronize(stream)
        assert event.is_done
        node.barrier()
        if node.is_leader:
            latch.hold(stream.ptr)
            event.record()
        else:
            event.wait()
        held = [event.is_done for _ in range(100)]
        node.barrier()
        latch.release()
        node.synchronize(stream)
        assert not any(held)
        assert event.is_done
    node.barrier()


@TWO
def test_is_done_speaks_of_the_record_that_was_taken(node, streams):
    """The owner runs ahead on a held stream: the waiter's record stays done."""
    event, stream = node.event(), streams[0]
    with Latch() as latch, stream:
        (event.record if node.is_leader else event.wait)()
        node.synchronize(stream)
        node.barrier()
        if node.is_leader:
            latch.hold(stream.ptr)
            for _ in range(40):
                event.record()
        node.barrier()
        assert event.is_done == (not node.is_leader)
        node.barrier()
        latch.release()
        node.synchronize(stream)
        assert event.is_done
    node.barrier()

"""The order of the calls on one object, on streams that only write down what happens to them."""

import pytest

from mpishare.errors import UnsupportedError
from mpishare.runtime.stream_chain import StreamChain


class Streams:
    """Streams are ints; those of `foreign` may be destroyed, those of `captured` are captured."""

    has_streams = True

    def __init__(self):
        self.calls, self.foreign, self.captured, self.current = [], set(), set(), 1
        self.record = lambda event, handle: self.calls.append(("record", handle))
        self.wait_event = lambda event, handle: self.calls.append(("wait", handle))
        self.close_events = lambda events: self.calls.append(("close", *events))
        self.is_done = self.is_event_done = lambda what: ("done", what) in self.calls
        self.is_capturing = lambda handle: handle in self.captured
        self.is_current = lambda handle: handle == self.current and handle not in self.captured
        self.local_event = lambda: "event"

    def enter(self, stream):
        handle = self.current if stream is None else stream
        return handle, None, handle not in self.foreign, handle in self.captured


@pytest.fixture
def streams():
    return Streams()


@pytest.fixture
def chain(streams):
    return StreamChain(streams, "window 1")


def test_a_stream_that_stays_needs_no_order(streams, chain):
    assert [chain.enter("fence", stream) for stream in (None, 1, None, 1)] == [1] * 4
    chain.leave()
    assert streams.calls == []


def test_another_stream_waits_for_the_last_one(streams, chain):
    chain.enter("fence", None)
    assert chain.enter("fence", 2) == 2
    streams.current = 3
    assert chain.enter("fence", None) == 3
    assert streams.calls == [("record", 1), ("wait", 2), ("record", 2), ("wait", 3)]


def test_a_stream_that_may_be_destroyed_is_recorded_at_the_end_of_the_call(streams, chain):
    streams.foreign = {2}
    chain.enter("fence", 2)
    chain.leave()
    streams.foreign = {2, 3}
    chain.enter("fence", 3)  # 2 may be gone: it is not touched again
    assert streams.calls == [("record", 2), ("wait", 3)]
    chain.leave()
    chain.enter("fence", 3)  # the same number, maybe of another stream
    assert streams.calls[2:] == [("record", 3), ("wait", 3)]


def test_a_captured_stream_is_refused_by_name_and_changes_nothing(streams, chain):
    chain.enter("fence", 1)
    streams.captured = {2}
    with pytest.raises(UnsupportedError, match=r"window 1: post failed.*captured"):
        chain.enter("post", 2)
    streams.captured, streams.current = {1}, 1
    with pytest.raises(UnsupportedError, match="captured"):
        chain.enter("post", None)
    assert (chain.handle, streams.calls) == (1, [])


def test_a_last_stream_that_is_captured_now_cannot_be_followed(streams, chain):
    chain.enter("fence", 1)
    streams.captured = {1}
    with pytest.raises(UnsupportedError, match="another stream cannot wait"):
        chain.enter("fence", 2)
    assert (chain.handle, streams.calls) == (1, [])


def test_whether_all_is_over(streams, chain):
    assert chain.is_over()
    chain.enter("fence", 1)
    assert not chain.is_over()
    streams.calls.append(("done", 1))
    assert chain.is_over()
    streams.foreign = {2}
    chain.enter("fence", 2)
    chain.leave()
    assert not chain.is_over()
    streams.calls.append(("done", "event"))
    assert chain.is_over()
    chain.end()
    assert chain.handle is None
    assert streams.calls[-1] == ("close", "event")

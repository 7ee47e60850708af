"""What a capture notes of the calls made in it, and what it takes back."""

import threading

import pytest

from mpishare import UnsupportedError
from mpishare.coordination import recording
from mpishare.coordination.recording import Recording


class Engine:
    def __init__(self):
        self.calls = [7]


def test_calls_are_counted_and_taken_back():
    one, two = Engine(), Engine()
    with Recording("it", is_loop=False) as now:
        for engine in (one, two, one):
            now.add(engine)
            engine.calls[0] += 1
    assert now.engines == [one, two]
    assert now.take_calls() == [(one, 2), (two, 1)]
    assert one.calls == two.calls == [7]


def test_a_failed_capture_undoes():
    engine, undone = Engine(), []
    with Recording("it", is_loop=True) as now:
        now.add(engine)
        engine.calls[0] += 1
        now.undo.append(lambda: undone.append(1))
        now.fail()
    assert engine.calls == [7]
    assert undone == [1]


def fail_in(recorded, seen):
    with recorded:
        seen.append(recording.current())
        other = threading.Thread(target=lambda: seen.append(recording.current()))
        other.start()
        other.join()
        recording.require_none("fence", "no")


def test_a_recording_is_of_its_thread_and_ends_by_an_exception():
    now, seen = Recording("it", is_loop=False), []
    with pytest.raises(UnsupportedError, match=r"fence failed inside it: no.*captured function"):
        fail_in(now, seen)
    assert seen == [now, None]
    assert recording.current() is None
    recording.require_none("fence", "no")

"""What a rank says of the line that it is in, and when."""

import os
import threading
from contextlib import contextmanager

import pytest

from mpishare.coordination import where
from mpishare.coordination.control_block import ControlBlock, Departure, State
from mpishare.coordination.poll import poll
from mpishare.memory import shared


@pytest.fixture
def block():
    made = ControlBlock(shared.create(ControlBlock.nbytes_for(2)), 0, 2)
    yield made
    made.close()


@contextmanager
def waiting(text, file="job.py", **names):
    """Run a program of that name in a thread, until it is in its call of `wait`."""
    over, inside = threading.Event(), threading.Event()

    def wait():
        inside.set()
        over.wait(20)

    names |= {"over": over, "inside": inside, "wait": wait}
    program = compile(text, file, "exec")
    thread = threading.Thread(target=exec, args=(program, names), daemon=True)
    thread.start()
    assert inside.wait(20)
    yield thread.ident
    over.set()
    thread.join()


def place_of(block, thread):
    since_ns = block.ask()
    where.answer(block, thread)
    (place,) = where.answers(block, [0], since_ns).values()
    return place


IN_OURS = "inside.set()\npoll(over.is_set, 20)\n"


def test_a_call_of_ours_is_named(block):
    with waiting(IN_OURS, poll=poll) as thread:
        assert place_of(block, thread) == "in job.py:2, <module> (in poll)"
        block.begin_wait("window 3: fence", [1])
        assert place_of(block, thread) == "in job.py:2, <module> (in window 3: fence)"


def test_a_line_of_a_package_is_named_behind_that_of_the_program(block):
    package = {}
    text = "def solve(wait):\n    wait()\n"
    exec(compile(text, "/opt/lib/site-packages/solver/core.py", "exec"), package)
    with waiting(
        "def main():\n    solve(inside.set() or over.wait)\n\nmain()\n", solve=package["solve"]
    ) as thread:
        place = place_of(block, thread)
        assert place == "in job.py:2, main (in solver/core.py:2, solve)"


@pytest.mark.parametrize("folder", ["deep/er/" * 300, "\U0001f600" * 2000, "\x1b[2J" * 200])
def test_of_a_long_path_the_end_is_kept(block, folder):
    text = f"def {'f' * 500}():\n    inside.set() or over.wait(20)\n\n{'f' * 500}()\n"
    with waiting(text, f"/{folder}/job.py") as thread:
        place = place_of(block, thread)
    assert place.startswith("in ...")
    assert "/job.py:2, fff" in place
    assert place.isprintable()


def test_a_thread_that_has_ended_is_nowhere(block):
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert place_of(block, thread.ident) == "in no line of Python"


@pytest.mark.parametrize("state", [State.CLOSED, State.EXITED])
def test_a_rank_at_its_end_is_not_called_silent(block, monkeypatch, state):
    """Its watchdog has ended, and its process goes on."""
    monkeypatch.setattr(block, "pid", lambda _: os.getpid())
    monkeypatch.setattr(block, "state", lambda _: state)
    assert "at its end" in where.describe_all(block, [1], block.ask())[1]


def test_nothing_is_said_that_nobody_asked(block):
    where.answer(block, threading.get_ident())
    assert where.answers(block, [0], 0) == {}
    first = block.ask()
    where.answer(block, threading.get_ident())
    (place,) = where.answers(block, [0], first).values()
    assert "test_where.py" in place
    then = block.ask()
    assert where.answers(block, [0], then) == {}  # an old answer is none
    where.answer(block, threading.get_ident())
    assert [*where.answers(block, [0], then)] == [0]


def test_what_a_rank_said_before_it_left_counts_and_nothing_later(block):
    """Its thread is then where it heard of the reason."""
    first = block.ask()
    where.answer(block, threading.get_ident())
    block.depart(State.LEFT, Departure("as another rank does"))
    assert [*where.describe_all(block, [0], first)] == [0]
    then = block.ask()
    where.answer(block, threading.get_ident())
    assert where.describe_all(block, [0], then) == {}

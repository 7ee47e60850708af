"""The door: descriptors go to processes of this user, leases end with those who held them."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mpishare.errors import HandleError, PeerTimeout, UnsupportedError
from mpishare.memory.door import Door, Visit
from tests.helpers.launch import ROOT


@pytest.fixture
def name():
    return f"test-{os.getpid()}"


@pytest.fixture
def door():
    door = Door()
    yield door
    door.close()


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def wait_for(is_true, timeout_s=5.0):
    """Poll what another thread brings about."""
    event = threading.Event()
    for _ in range(int(timeout_s / 0.005)):
        if is_true():
            return True
        event.wait(0.005)
    return is_true()


def test_a_descriptor_travels(door, name, tmp_path):
    path = Path(tmp_path, "file")
    path.write_text("the same file")
    with path.open() as file:
        door.open(name, lambda request: ({"echo": request["word"]}, [file.fileno()]))
        with Visit(name, 5.0) as visit:
            reply, fds = visit.ask({"word": "hello"})
            assert reply == {"echo": "hello"}
            assert os.pread(fds[0], 100, 0) == b"the same file"
            assert not os.get_inheritable(fds[0])
            os.close(fds[0])


def test_a_lease_ends_with_its_process(door, name):
    door.open(name, lambda request: ({}, []))
    source = (
        "import sys; from mpishare.memory.door import Visit\n"
        f"visit = Visit({name!r}, 5.0); visit.ask({{}}); print('in', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", source], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"in\n"
        assert door.leases(name) == [process.pid]
        process.kill()
        process.wait()
        assert wait_for(lambda: not door.leases(name))


def test_a_taken_name_and_a_name_that_nobody_has(door, name):
    with pytest.raises(HandleError, match="nobody answers"):
        Visit(name, 5.0)
    door.open(name, lambda request: ({}, []))
    other = Door()
    with pytest.raises(HandleError, match="is taken"):
        other.open(name, lambda request: ({}, []))
    other.close()
    door.shut(name)
    with pytest.raises(HandleError, match="nobody answers"):
        Visit(name, 5.0)
    with pytest.raises(ValueError, match="too long by"):
        door.open("x" * 120, lambda request: ({}, []))


def test_what_an_answer_raises_is_told_and_the_door_goes_on(door, name):
    def answer(request):
        if request:
            raise KeyError("nonsense")
        return {"fine": True}, []

    door.open(name, answer)
    with Visit(name, 5.0) as visit:
        with pytest.raises(UnsupportedError, match="KeyError: 'nonsense'"):
            visit.ask({"a": 1})
        assert visit.ask({}) == ({"fine": True}, [])


def test_a_slow_visitor_stops_nobody(door, name):
    door.open(name, lambda request: ({}, []))
    with Visit(name, 5.0), Visit(name, 5.0) as other:  # the first never asks
        assert other.ask({}) == ({}, [])


def test_a_door_that_does_not_answer_is_a_timeout(door, name):
    held = threading.Event()

    def answer(request):
        held.wait(10)
        return {}, []

    door.open(name, answer)
    try:
        with Visit(name, 0.2) as visit, pytest.raises(PeerTimeout, match=r"within 0\.2 s"):
            visit.ask({})
    finally:
        held.set()


def test_a_shut_name_ends_its_leases(door, name):
    door.open(name, lambda request: ({}, []))
    with Visit(name, 5.0) as visit:
        visit.ask({})
        door.shut(name)
        with pytest.raises(HandleError, match="is gone"):
            visit.ask({})


def test_no_descriptor_is_left(name):
    def once():
        door = Door()
        door.open(name, lambda request: ({}, [0]))
        with Visit(name, 5.0) as visit:
            _, fds = visit.ask({})
            os.close(fds[0])
        door.close()

    once()
    before = descriptors()
    for _ in range(100):
        once()
    assert descriptors() == before
    assert threading.active_count() == 1


def test_a_withdrawn_name_keeps_its_leases_and_can_be_opened_again(door, name):
    door.open(name, lambda request: ({}, []))
    with Visit(name, 5.0) as visit:
        visit.ask({"maps": True})
        door.withdraw(name, "elsewhere")
        assert door.leases("elsewhere") == door.leases("elsewhere", "maps") == [os.getpid()]
        assert door.leases("elsewhere", "other") == door.leases(name) == []
        assert not visit.is_over()
        door.open(name, lambda request: ({"second": True}, []))
        with Visit(name, 5.0) as second:
            assert second.ask({}) == ({"second": True}, [])
        with pytest.raises(UnsupportedError, match="KeyError"):
            visit.ask({})
        door.tell("elsewhere", {"is_over": True})
        assert wait_for(visit.is_over)
        door.shut("elsewhere")
        assert wait_for(lambda: not door.leases("elsewhere"))


def test_who_left_is_told(door, name):
    left = []
    door.open(name, lambda request: ({}, []), lambda: left.append(door.leases(name)))
    with Visit(name, 5.0) as visit, Visit(name, 5.0) as other:
        visit.ask({})
        other.ask({})
        visit.close()
        assert wait_for(lambda: left == [[os.getpid()]])


def test_a_wait_of_another_thread_ends_when_the_visitor_hangs_up(door, name):
    door.open(name, lambda request: ({}, []))
    with Visit(name, 5.0) as visit:
        visit.ask({})
        thread = threading.Thread(target=visit.wait_until_over)
        thread.start()
        assert not visit.is_over()  # beside the wait
        visit.hang_up()
        thread.join(5)
        assert not thread.is_alive()


def test_too_many_visitors_are_refused_and_cost_nothing(door, name):
    door.open(name, lambda request: ({}, []))
    visits = []
    for _ in range(256):
        visits.append(Visit(name, 5.0))
        visits[-1].ask({})
    before = descriptors()
    with Visit(name, 5.0) as visit, pytest.raises(UnsupportedError, match="256 visitors already"):
        visit.ask({})
    visits.pop().close()
    assert wait_for(lambda: len(door.leases(name)) == 255)
    assert descriptors() == before - 2
    with Visit(name, 5.0) as visit:
        assert visit.ask({}) == ({}, [])
    for visit in visits:
        visit.close()


def test_a_process_without_descriptors_turns_visitors_away_and_does_not_spin(name):
    source = f"""
import os, resource, sys, time
from mpishare.memory.door import Door
door = Door()
door.open({name!r}, lambda request: ({{}}, []))
files = []
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    while True:
        files.append(os.dup(0))
except OSError:
    pass
print("full", flush=True)
sys.stdin.readline()
begin = time.process_time()
time.sleep(0.5)
print(time.process_time() - begin, flush=True)
for fd in files:
    os.close(fd)
print("room", flush=True)
sys.stdin.readline()
"""
    with subprocess.Popen(
        [sys.executable, "-c", source],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "full\n"
        with Visit(name, 5.0) as visit, pytest.raises(HandleError, match="is gone"):
            visit.ask({})
        process.stdin.write("\n")
        process.stdin.flush()
        assert float(process.stdout.readline()) < 0.2
        assert process.stdout.readline() == "room\n"
        with Visit(name, 5.0) as visit:
            assert visit.ask({}) == ({}, [])
        process.stdin.close()


@pytest.fixture
def fork():
    """Fork a child that does some work, then waits for its end, which is the end of the test."""
    reader, writer = os.pipe()
    children = []

    def fork(work):
        done_reader, done_writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(writer)
                work()
                os.write(done_writer, b"d")
                os.read(reader, 1)
            finally:
                os._exit(0)
        os.close(done_writer)
        assert os.read(done_reader, 1) == b"d"
        os.close(done_reader)
        children.append(child)

    yield fork
    os.close(writer)
    os.close(reader)
    for child in children:
        os.waitpid(child, 0)


def test_a_forked_child_keeps_no_door_open(door, name, fork):
    door.open(name, lambda request: ({}, []))
    with Visit(name, 5.0) as visit:
        visit.ask({})
        fork(lambda: None)
        door.shut(name)
        assert wait_for(visit.is_over)
    with pytest.raises(HandleError, match="nobody answers"):
        Visit(name, 0.5)


@pytest.mark.parametrize("call", [lambda door, _: door.close(), Door.shut])
def test_a_forked_child_that_closes_its_door_leaves_that_of_its_parent(door, name, fork, call):
    door.open(name, lambda request: ({"word": request["word"]}, []))
    fork(lambda: call(door, name))
    with Visit(name, 2.0) as visit:
        assert visit.ask({"word": "hello"})[0] == {"word": "hello"}


def test_what_a_door_says_on_its_own_account_is_no_answer(door, name):
    """Else a viewer would map memory whose owner has stopped counting who does."""
    door.open(name, lambda request: ({"asked": True}, []))
    with Visit(name, 5.0) as visit:
        assert visit.ask({}) == ({"asked": True}, [])
        door.withdraw(name, "kept")
        door.tell("kept", {"is_over": True})
        with pytest.raises(HandleError, match="ended the visit"):
            visit.ask({"maps": True})
        assert door.leases("kept", "maps") == []


def test_a_forked_child_of_a_visitor_ends_no_lease(door, name, fork):
    door.open(name, lambda request: ({}, []))
    with Visit(name, 5.0) as visit:
        visit.ask({})
        fork(lambda: (visit.hang_up(), visit.close()))
        assert not visit.is_over()
        visit.ask({})
        assert door.leases(name) == [os.getpid()]

"""The door: descriptors go to processes of this user, leases end with those who held them."""

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mpishare.errors import HandleError, PeerTimeout, UnsupportedError
from mpishare.memory.door import Door
from mpishare.memory.visit import Visit, borrow
from tests.helpers.held import held
from tests.helpers.latch import within
from tests.helpers.planted import needs_two_users
from tests.helpers.viewer import Viewer

NAME = "test"


def visit_of(opening, timeout_s=5.0):
    return Visit(opening.address, NAME, timeout_s)


@pytest.fixture
def door():
    door = Door()
    yield door
    door.close()


@pytest.fixture
def opening(door):
    """One that answers nothing to whatever it is asked."""
    return door.open(NAME, lambda request, _: ({}, []))


def test_a_descriptor_travels(door, tmp_path):
    path = Path(tmp_path, "file")
    path.write_text("the same file")
    with path.open() as file:
        opening = door.open(NAME, lambda request, _: ({"echo": request["word"]}, [file.fileno()]))
        with visit_of(opening) as visit:
            reply, fds = visit.ask({"word": "hello"}, most_fds=1)
            assert reply == {"echo": "hello"}
            assert os.pread(fds[0], 100, 0) == b"the same file"
            assert not os.get_inheritable(fds[0])
            os.close(fds[0])


def test_a_lease_ends_with_its_process(door, opening):
    with Viewer() as visitor:
        visitor(f"visit = mpishare.memory.visit.Visit({opening.address!r}, 'test', 5.0)")
        assert visitor("visit.ask({})") == [{}, []]
        assert opening.leases() == [visitor.pid]
        visitor.kill()
        assert within(5, lambda: not opening.leases())


def test_each_opening_has_an_address_of_its_own(door):
    """One that is known could be bound by another user in between."""
    openings = [door.open(NAME, lambda request, _, n=n: ({"n": n}, [])) for n in range(2)]
    for n, opening in enumerate(openings):
        with visit_of(opening) as visit:
            assert visit.ask({}) == ({"n": n}, [])
        opening.shut()
        with pytest.raises(HandleError, match="nobody answers for test"):
            visit_of(opening)
    addresses = [each.address for each in openings]
    assert door.open(NAME, lambda request, _: ({}, [])).address not in addresses
    with pytest.raises(ValueError, match="too long by"):
        door.open("x" * 120, lambda request, _: ({}, []))


def test_an_address_that_somebody_has_bound_is_left_for_another(door, monkeypatch):
    tokens = iter(["taken", "free", *["taken"] * 99])
    monkeypatch.setattr("secrets.token_urlsafe", lambda _: next(tokens))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as squatter:
        squatter.bind(f"\0mpishare/{os.getuid()}/{NAME}/taken")
        opening = door.open(NAME, lambda request, _: ({}, []))
        assert opening.address.endswith("/free")
        with visit_of(opening) as visit:
            assert visit.ask({}) == ({}, [])
        with pytest.raises(HandleError, match="random addresses"):
            door.open(NAME, lambda request, _: ({}, []))


def test_what_an_answer_raises_is_told_and_the_door_goes_on(door):
    def answer(request, _):
        if request:
            raise KeyError("nonsense")
        return {"fine": True}, []

    opening = door.open(NAME, answer)
    with visit_of(opening) as visit:
        with pytest.raises(UnsupportedError, match="KeyError: 'nonsense'"):
            visit.ask({"a": 1})
        assert visit.ask({}) == ({"fine": True}, [])


def test_a_slow_visitor_stops_nobody(door, opening):
    with visit_of(opening), visit_of(opening) as other:  # the first never asks
        assert other.ask({}) == ({}, [])


@pytest.fixture
def busy(door):
    """A door whose thread is held, with no room for another connection, and what lets it go on."""
    is_held, go_on = threading.Event(), threading.Event()

    def answer(request, _):
        is_held.set()
        assert go_on.wait(30)
        return {}, []

    opening = door.open(NAME, answer)
    with contextlib.ExitStack() as stack:
        stack.callback(go_on.set)
        first = stack.enter_context(visit_of(opening))
        first._connection.send(b"{}")
        assert is_held.wait(5)
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                stack.enter_context(waiting).setblocking(False)
                waiting.connect(f"\0{opening.address}")
        yield opening, go_on


def test_a_door_that_does_not_answer_is_a_timeout(door, busy):
    begin = time.monotonic()
    with pytest.raises(PeerTimeout, match=r"no answer from test within 0\.2 s"):
        visit_of(busy[0], 0.2)
    assert 0.2 <= time.monotonic() - begin < 2
    busy[1].set()
    held = threading.Event()
    opening = door.open(NAME, lambda request, _: (held.wait(10) and {}, []))
    with visit_of(opening, 0.2) as visit, pytest.raises(PeerTimeout, match=r"within 0\.2 s"):
        visit.ask({})
    held.set()


def test_three_hundred_ranks_that_come_at_once_are_all_answered(busy):
    """More than a backlog holds, and than the viewers that a job takes."""
    opening, go_on = busy
    are_in = threading.Barrier(300)

    def come(number):
        if number == 299:
            go_on.set()
        with visit_of(opening, 30) as visit:
            answer = visit.ask({})
            are_in.wait(30)  # all hold their leases at the same time
        return answer

    with ThreadPoolExecutor(300) as pool:
        assert list(pool.map(come, range(300))) == [({}, [])] * 300


def test_a_signal_during_a_connect_does_not_pass_for_a_connection(busy):
    seen = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(None))
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        with pytest.raises(PeerTimeout):
            visit_of(busy[0], 0.2)
        assert seen
        threading.Timer(0.1, busy[1].set).start()
        with visit_of(busy[0]) as visit:
            assert visit.ask({}) == ({}, [])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "said", [b"\xff\0garbage", b"{", b"[1]", b"null", b"3", b"[" * 20_000], ids=repr
)
def test_what_is_no_door_is_told_in_words(said):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0test-{os.getpid()}")
        listener.listen()
        before = held().fds
        with Visit(f"test-{os.getpid()}", NAME, 5.0) as visit, listener.accept()[0] as connection:
            socket.send_fds(connection, [said], [0, 1])
            with pytest.raises(HandleError, match="test is answered by a process that is no"):
                visit.ask({})
        assert held().fds == before


def test_words_of_a_door_cannot_move_the_cursor(door):
    def answer(request, _):
        raise ValueError("\x1b[2J\n\u202e" + "x" * 1000)

    with (
        visit_of(door.open(NAME, answer)) as visit,
        pytest.raises(UnsupportedError) as told,
    ):
        visit.ask({})
    assert "ValueError: \\x1b[2J\\n\\u202exxx" in str(told.value)
    assert str(told.value).isprintable()
    assert len(str(told.value)) < 600


def test_what_a_visitor_asked_is_not_kept(door, opening):
    with visit_of(opening) as visit:
        for number in range(100):
            visit.ask({str(number): True, "maps": [number]})
        assert len(opening._visitors[0].asked) <= 3
        assert opening.leases("maps") == []
        visit.ask({"maps": True})
        visit.ask({})
        assert opening.leases("maps") == [os.getpid()]


STRANGERS = """
import os, socket, sys, time
os.setgid(65534); os.setuid(65534)
begin = time.monotonic()
for _ in range(1000):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(chr(0) + sys.argv[1])
print(time.monotonic() - begin)
"""


@needs_two_users
def test_another_user_who_knocks_all_the_time_neither_starves_nor_slows(door):
    opening = door.open(NAME, lambda request, _: ({}, []), most=3)
    command = [sys.executable, "-c", STRANGERS, opening.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as strangers:
        assert within(5, lambda: door._strangers)
        for _ in range(3):
            with visit_of(opening, 20) as visit:
                assert visit.ask({}) == ({}, [])
        assert float(strangers.stdout.readline()) > 0.4  # at full speed it takes 0.15
    assert within(5, lambda: not opening.leases())


@needs_two_users
def test_another_user_who_knocks_does_not_hold_up_a_file_that_ranks_borrow(
    door, monkeypatch, tmp_path
):
    monkeypatch.setattr("mpishare.memory.door._REST_S", 5.0)
    Path(tmp_path, "file").touch()
    with Path(tmp_path, "file").open() as file:
        token = door.lend(file.fileno())
        command = [sys.executable, "-c", STRANGERS, token.rpartition("/")[0]]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as strangers:
            assert within(5, lambda: door._strangers)
            try:
                for _ in range(20):
                    os.close(borrow(0, token, 2.0))
                    time.sleep(0.005)
            finally:
                strangers.kill()
        door.take_back(token)


def test_a_shut_name_ends_its_leases(door, opening):
    with visit_of(opening) as visit:
        visit.ask({})
        opening.shut()
        with pytest.raises(HandleError, match="is gone"):
            visit.ask({})


def test_no_descriptor_is_left():
    def once():
        door = Door()
        opening = door.open(NAME, lambda request, _: ({}, [0]))
        with visit_of(opening) as visit:
            _, fds = visit.ask({}, most_fds=1)
            os.close(fds[0])
        door.close()

    threads = threading.active_count()  # pytest-xdist has some
    once()
    before = held().fds
    for _ in range(100):
        once()
    assert held().fds == before
    assert threading.active_count() <= threads


def test_a_withdrawn_address_keeps_its_leases(door, opening):
    with visit_of(opening) as visit:
        visit.ask({"maps": True})
        opening.withdraw()
        assert opening.leases() == opening.leases("maps") == [os.getpid()]
        assert opening.leases("attaches") == []
        assert not visit.is_over()
        with pytest.raises(HandleError, match="nobody answers"):
            visit_of(opening)
        with pytest.raises(UnsupportedError, match="withdrawn"):
            visit.ask({"attaches": True})
        assert opening.leases("attaches") == []
        opening.end_leases(0)
        assert within(5, visit.is_over)
        opening.shut()
        assert within(5, lambda: not opening.leases())


def test_the_end_of_leases_is_awaited_for_so_long(opening):
    with visit_of(opening) as visit, visit_of(opening) as other:
        visit.ask({"maps": True})
        other.ask({})
        assert opening.end_leases(0.05, "maps") == [os.getpid()]
        begin = time.monotonic()
        threading.Timer(0.1, visit.close).start()
        assert opening.end_leases(20, "maps") == []
        assert 0.1 <= time.monotonic() - begin < 5
        assert opening.leases() == [os.getpid()]


def test_who_left_is_told(door):
    left = []
    opening = door.open(NAME, lambda request, _: ({}, []), lambda _: left.append(opening.leases()))
    with visit_of(opening) as visit, visit_of(opening) as other:
        visit.ask({})
        other.ask({})
        visit.close()
        assert within(5, lambda: left == [[os.getpid()]])


def test_a_wait_of_another_thread_ends_when_the_visitor_hangs_up(door, opening):
    with visit_of(opening) as visit:
        visit.ask({})
        thread = threading.Thread(target=visit.wait_until_over)
        thread.start()
        assert not visit.is_over()  # beside the wait
        visit.hang_up()
        thread.join(5)
        assert not thread.is_alive()


def test_too_many_viewers_are_refused_and_cost_nothing(door):
    openings = [door.open(NAME, lambda request, _: ({}, []), most=40) for _ in range(2)]
    visits = []
    for number in range(40):
        visits.append(visit_of(openings[number % 2]))
        visits[-1].ask({})
    before = held().fds
    refused = pytest.raises(UnsupportedError, match="40 visitors already")
    with visit_of(openings[0]) as visit, refused:
        visit.ask({})
    with visit_of(door.open(NAME, lambda request, _: ({}, []))) as rank:
        assert rank.ask({}) == ({}, [])
        before += 1  # that opening
    visits.pop().close()
    assert within(5, lambda: sum(len(each._visitors) for each in openings) == 39)
    assert held().fds == before - 2
    with visit_of(openings[0]) as visit:
        assert visit.ask({}) == ({}, [])
    for visit in visits:
        visit.close()


def test_a_process_without_descriptors_turns_visitors_away_and_does_not_spin():
    source = """
import resource
from mpishare.memory.door import Door
opening = Door().open("test", lambda request, _: ({}, []))
files = []
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
while True:
    files.append(os.dup(0))
"""
    with Viewer() as process:
        process.raises("OSError", source, "Too many open files")
        address = process("opening.address")
        with Visit(address, NAME, 5.0) as visit, pytest.raises(UnsupportedError, match="ulimit"):
            visit.ask({})
        process("begin = time.process_time(); time.sleep(0.5); spent = time.process_time() - begin")
        assert process("spent") < 0.2
        process("for fd in files: os.close(fd)")
        with Visit(address, NAME, 5.0) as visit:
            assert visit.ask({}) == ({}, [])


def test_a_spare_descriptor_that_another_thread_takes_is_had_again():
    source = """
import resource, threading
from mpishare.memory import door
here = door.Door()
opening = here.open("test", lambda request, _: ({}, []))
files, refuse, refused = [], door._refuse, threading.Event()

def refuse_late(connection, why):
    refuse(connection, why)
    files.append(os.dup(0))  # as another thread would, now that there is room
    refused.set()

def fill():
    while True:
        try:
            files.append(os.dup(0))
        except OSError:
            return

def give_back():
    while files:
        os.close(files.pop())

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
"""
    with Viewer() as process:
        process(source)
        address = process("opening.address")
        for late in (True, False):
            process(f"door._refuse = {'refuse_late' if late else 'refuse'}; fill()")
            visit = Visit(address, NAME, 5.0)
            with visit, pytest.raises(UnsupportedError, match="ulimit"):
                visit.ask({})
            assert process("refused.wait(5)")
            process("give_back()")
            with Visit(address, NAME, 5.0) as visit:
                assert visit.ask({}) == ({}, [])
            assert within(5, lambda: not process("opening.leases()"))  # its descriptor is free
        process("fill(); here.close()")
        process("for fd in files: os.fstat(fd)")  # the door has closed its own alone


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


def test_a_forked_child_keeps_no_door_open(door, fork, opening):
    with visit_of(opening) as visit:
        visit.ask({})
        fork(lambda: None)
        opening.shut()
        assert within(5, visit.is_over)
    with pytest.raises(HandleError, match="nobody answers"):
        visit_of(opening, 0.5)


@pytest.mark.parametrize(
    "call",
    [lambda door, _: door.close(), lambda _, opening: opening.shut()],
    ids=["door", "opening"],
)
def test_a_forked_child_that_closes_its_door_leaves_that_of_its_parent(door, fork, call):
    opening = door.open(NAME, lambda request, _: ({"word": request["word"]}, []))
    fork(lambda: call(door, opening))
    with visit_of(opening, 2.0) as visit:
        assert visit.ask({"word": "hello"})[0] == {"word": "hello"}


def test_what_a_door_says_on_its_own_account_is_no_answer(door):
    """Else a viewer would map memory whose owner has stopped counting who does."""
    opening = door.open(NAME, lambda request, _: ({"asked": True}, []))
    with visit_of(opening) as visit:
        assert visit.ask({}) == ({"asked": True}, [])
        opening.withdraw()
        opening.end_leases(0)
        with pytest.raises(HandleError, match="ended the visit"):
            visit.ask({"maps": True})
        assert opening.leases("maps") == []


def test_a_request_that_the_kernel_refuses_is_awaited_by_nobody(opening):
    class Full(socket.socket):
        def send(self, *_):
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

    with visit_of(opening) as visit:
        visit._connection = Full(fileno=visit._connection.detach())
        visit.answer_within(5.0)
        begin = time.monotonic()
        with pytest.raises(HandleError, match="No buffer space available"):
            visit.ask({})
        assert time.monotonic() - begin < 2


def test_a_forked_child_of_a_visitor_ends_no_lease(door, fork, opening):
    with visit_of(opening) as visit:
        visit.ask({})
        fork(lambda: (visit.hang_up(), visit.close()))
        assert not visit.is_over()
        visit.ask({})
        assert opening.leases() == [os.getpid()]

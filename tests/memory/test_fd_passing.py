"""Descriptors go to processes of this user; leases end with those who held them."""

import contextlib
import multiprocessing
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
from mpishare.memory.fd_client import FdClient, fetch_fd
from mpishare.memory.fd_server import FdServer
from tests.helpers.held import held
from tests.helpers.latch import within
from tests.helpers.planted import needs_two_users
from tests.helpers.viewer import Viewer

NAME = "test"
# An address that was given back is free for everybody: scenes that run beside these tests have
# another user who takes them all.
GONE = "nobody answers|a process of another user"


def client_of(endpoint, timeout_s=60.0):
    return FdClient(endpoint.address, NAME, timeout_s)


@pytest.fixture
def server():
    server = FdServer()
    yield server
    server.close()


@pytest.fixture
def endpoint(server):
    """One that answers nothing to whatever it is asked."""
    return server.open(NAME, lambda request, _: ({}, []))


@pytest.fixture
def file(tmp_path):
    path = Path(tmp_path, "file")
    path.write_text("the same file")
    with path.open() as file:
        yield file


def test_a_descriptor_travels(server, file):
    endpoint = server.open(NAME, lambda request, _: ({"echo": request["word"]}, [file.fileno()]))
    with client_of(endpoint) as client:
        reply, fds = client.ask({"word": "hello"}, n_files=1)
        assert reply == {"echo": "hello"}
        assert os.pread(fds[0], 100, 0) == b"the same file"
        assert not os.get_inheritable(fds[0])
        os.close(fds[0])


def test_a_file_is_offered_until_it_is_withdrawn(server, file):
    tokens = [server.offer_fd(file.fileno()) for _ in range(2)]
    fd = fetch_fd(0, tokens[0], 5.0)
    assert os.pread(fd, 100, 0) == b"the same file"
    os.close(fd)
    server.withdraw(tokens[0])
    with pytest.raises(UnsupportedError, match="KeyError"):
        fetch_fd(0, tokens[0], 5.0)
    os.close(fetch_fd(0, tokens[1], 5.0))
    server.withdraw(tokens[1])
    with pytest.raises(HandleError, match=GONE):
        fetch_fd(0, tokens[1], 5.0)


def test_each_endpoint_has_an_address_of_its_own(server):
    """One that is known could be bound by another user in between."""
    endpoints = [server.open(NAME, lambda request, _, n=n: ({"n": n}, [])) for n in range(2)]
    for n, endpoint in enumerate(endpoints):
        with client_of(endpoint) as client:
            assert client.ask({}) == ({"n": n}, [])
        endpoint.shut()
        with pytest.raises(HandleError, match=GONE):
            client_of(endpoint)
    assert endpoints[0].address != endpoints[1].address


def test_an_error_of_an_answer_is_raised_at_the_client_and_the_server_goes_on(server):
    def answer(request, _):
        if request:
            raise KeyError("\x1b[2J\n\u202e" + "x" * 1000)
        return {"fine": True}, []

    with client_of(server.open(NAME, answer)) as client:
        with pytest.raises(UnsupportedError, match="KeyError") as raised:
            client.ask({"a": 1})
        assert client.ask({}) == ({"fine": True}, [])
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 600


def test_a_slow_client_stops_nobody(endpoint):
    with client_of(endpoint), client_of(endpoint) as other:  # the first never asks
        assert other.ask({}) == ({}, [])


@pytest.fixture
def full(server):
    """An endpoint whose thread is held, with no room for another connection; what lets it go on."""
    is_held, go_on = threading.Event(), threading.Event()

    def answer(request, _):
        is_held.set()
        assert go_on.wait(30)
        return {}, []

    endpoint = server.open(NAME, answer)
    with contextlib.ExitStack() as stack:
        stack.callback(go_on.set)
        first = stack.enter_context(client_of(endpoint))
        asking = threading.Thread(target=first.ask, args=[{}])
        asking.start()
        stack.callback(asking.join)
        stack.callback(go_on.set)
        assert is_held.wait(60)
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                stack.enter_context(waiting).setblocking(False)
                waiting.connect(f"\0{endpoint.address}")
        yield endpoint, go_on


def test_a_server_that_takes_no_connection_is_a_timeout(full):
    begin = time.monotonic()
    with pytest.raises(PeerTimeout, match=r"no answer from test within 0\.2 s"):
        client_of(full[0], 0.2)
    assert time.monotonic() - begin >= 0.2


def test_a_server_that_does_not_answer_is_a_timeout(server):
    is_over = threading.Event()
    endpoint = server.open(NAME, lambda request, _: (is_over.wait(10) and {}, []))
    with client_of(endpoint, 0.2) as client, pytest.raises(PeerTimeout, match=r"within 0\.2 s"):
        client.ask({})
    is_over.set()


def test_three_hundred_ranks_that_come_at_once_are_all_answered(full):
    """More than a backlog holds, and than the viewers that a job takes."""
    endpoint, go_on = full
    are_in = threading.Barrier(300)

    def come(number):
        if number == 299:
            go_on.set()
        with client_of(endpoint) as client:
            answer = client.ask({})
            are_in.wait(60)  # all hold their leases at the same time
        return answer

    with ThreadPoolExecutor(300) as pool:
        assert list(pool.map(come, range(300))) == [({}, [])] * 300


def test_a_signal_during_a_connect_does_not_pass_for_a_connection(full):
    seen = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(None))
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        with pytest.raises(PeerTimeout):
            client_of(full[0], 0.2)
        assert seen
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


STRANGERS = """
import os, socket, sys, time
os.setgid(65534); os.setuid(65534)
begin = time.monotonic()
for _ in range(1000):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(chr(0) + sys.argv[1])
        try:
            stranger.send(b"{}")
        except BrokenPipeError:
            pass
print(time.monotonic() - begin)
"""


@needs_two_users
def test_another_user_gets_no_answer_and_neither_starves_nor_slows(server, file):
    asked = []
    answer = lambda request, _: (asked.append(request) or {}, [])  # noqa: E731
    endpoint, token = server.open(NAME, answer, most=3), server.offer_fd(file.fileno())
    command = [sys.executable, "-c", STRANGERS, endpoint.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as strangers:
        for number in range(20):
            os.close(fetch_fd(0, token, 60.0))
            with client_of(endpoint) as client:
                assert client.ask({"number": number}) == ({}, [])
        assert float(strangers.stdout.readline()) > 0.8  # at full speed it takes 0.15
    assert asked == [{"number": number} for number in range(20)]


def test_what_a_shut_endpoint_has_answered_leaves_nothing():
    def once():
        server = FdServer()
        endpoint = server.open(NAME, lambda request, _: ({}, [0]))
        with client_of(endpoint) as client:
            _, fds = client.ask({}, n_files=1)
            os.close(fds[0])
            server.close()
            with pytest.raises(HandleError, match="is gone"):
                client.ask({})

    threads = threading.active_count()  # pytest-xdist has some
    before = held().fds
    for _ in range(100):
        once()
    assert within(60, lambda: held().fds == before and threading.active_count() <= threads)


def test_the_end_of_leases_is_awaited_for_so_long(endpoint):
    with client_of(endpoint) as client, client_of(endpoint) as other:
        client.ask({"maps": True})
        other.ask({})
        assert endpoint.leases("maps") == [os.getpid()]
        assert endpoint.end_leases(0.05, "maps") == [os.getpid()]
        assert client.is_over()
        with pytest.raises(HandleError, match=GONE):
            client_of(endpoint)
        # Else it would map memory whose owner no longer counts who does.
        with pytest.raises(HandleError, match="ended the connection"):
            other.ask({"maps": True})
        begin = time.monotonic()
        threading.Timer(0.1, client.close).start()
        assert endpoint.end_leases(60, "maps") == []
        assert 0.1 <= time.monotonic() - begin < 30
        assert endpoint.leases() == [os.getpid()]


def test_who_left_is_told(server):
    left = []
    endpoint = server.open(NAME, lambda r, _: ({}, []), lambda _: left.append(endpoint.leases()))
    with client_of(endpoint) as client, client_of(endpoint) as other:
        client.ask({})
        other.ask({})
        client.close()
        assert within(60, lambda: left == [[os.getpid()]])


def test_a_wait_of_another_thread_ends_when_the_client_hangs_up(endpoint):
    with client_of(endpoint) as client:
        client.ask({})
        thread = threading.Thread(target=client.wait_until_over)
        thread.start()
        assert not client.is_over()  # beside the wait
        client.hang_up()
        thread.join(60)
        assert not thread.is_alive()


def test_too_many_viewers_are_refused(server):
    endpoint = server.open(NAME, lambda request, _: ({}, []), most=2)
    first, second = client_of(endpoint), client_of(endpoint)
    assert second.ask({}) == ({}, [])
    with client_of(endpoint) as third, pytest.raises(UnsupportedError, match="2 visitors already"):
        third.ask({})
    first.close()
    assert within(60, lambda: len(endpoint.leases()) == 1)
    with client_of(endpoint) as third:
        assert third.ask({}) == ({}, [])
    second.close()


def test_a_process_without_descriptors_does_not_spin():
    source = """
import resource
from mpishare.memory.fd_server import FdServer
endpoint = FdServer().open("test", lambda request, _: ({}, []))
files = []
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
while True:
    files.append(os.dup(0))
"""
    with Viewer() as process:
        process.raises("OSError", source, "Too many open files")
        with FdClient(process("endpoint.address"), NAME, 60.0) as client:
            process("begin = time.process_time(); time.sleep(0.5)")
            assert process("time.process_time() - begin") < 0.2
            process("for fd in files: os.close(fd)")
            assert client.ask({}) == ({}, [])


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_keeps_no_endpoint_open_and_ends_nothing_of_its_parent(server, endpoint):
    fork = multiprocessing.get_context("fork")
    is_over, with_server = fork.Event(), server.open(NAME, lambda request, _: ({}, []))
    with client_of(endpoint) as client, client_of(with_server) as other:
        client.ask({})
        other.ask({})
        child = fork.Process(
            target=lambda: (server.close(), client.hang_up(), client.close(), is_over.wait())
        )
        child.start()
        try:
            with_server.shut()
            assert within(60, other.is_over)
            assert not client.is_over()
            assert client.ask({}) == ({}, [])
            assert endpoint.leases() == [os.getpid()]
        finally:
            is_over.set()
            child.join()
        assert not client.is_over()
    with pytest.raises(HandleError, match=GONE):
        client_of(with_server, 0.5)

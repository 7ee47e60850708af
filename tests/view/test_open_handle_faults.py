"""Openers and owners of a pool that die or stop, and forged handles."""

import contextlib
import os
import signal
import threading

import pytest

import mpishare
from tests.helpers.children import in_a_fork
from tests.helpers.latch import within
from tests.helpers.planted import NOBODY, listening, needs_two_users
from tests.helpers.viewer import Viewer

OWNER = """
node = mpishare.Node(backend="host")
window = node.allocate(1, name=f"owner-{os.getpid()}")
pool = node.pool(max_nbytes=1 << 20)
array, other = pool.allocate(4, "i8"), pool.allocate(4, "i8")
array[...] = other[...] = 42
"""


@contextlib.contextmanager
def owning():
    """A plain program, without mpirun, that has a pool; and the handles of its arrays."""
    with Viewer() as owner:
        try:
            owner(OWNER)
            handles = owner("[pool.handle(each).hex() for each in (array, other)]")
            yield owner.process, *map(bytes.fromhex, handles)
        finally:
            owner.kill()  # also where it is stopped


def stop(process):
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # until all of its threads stand still


def nobody_waits():
    """Whether no thread of this process waits for the end of a pool."""
    return not any(t.name == "mpishare-opened" for t in threading.enumerate())


@pytest.fixture
def owner():
    with owning() as (process, handle, _):
        yield process, handle


def test_what_is_open_outlives_a_killed_owner(owner):
    process, handle = owner
    array = mpishare.open_handle(handle)
    process.kill()
    process.wait()
    assert array.tolist() == [42] * 4
    with pytest.raises(mpishare.HandleError, match=r"open_handle failed: .* has ended"):
        mpishare.open_handle(handle)
    assert within(60, lambda: threading.active_count() > 1)  # waits for the array
    del array
    assert within(60, nobody_waits)


def test_a_stopped_owner_is_waited_for_as_long_as_each_call_says():
    with owning() as (process, handle, other), owning() as (_, elsewhere, _):
        stop(process)
        with pytest.raises(mpishare.PeerTimeout, match=r"within 0\.2 s: its process is stopped"):
            mpishare.open_handle(handle, timeout_s=0.2)
        with pytest.raises(mpishare.PeerTimeout, match=r"within 0\.2 s: its process is stopped"):
            mpishare.attach(f"owner-{process.pid}", timeout_s=0.2, wait_s=0.1)
        stuck = threading.Thread(target=mpishare.open_handle, args=[handle], daemon=True)
        stuck.start()
        stuck.join(0.1)
        assert mpishare.open_handle(elsewhere).tolist() == [42] * 4
        assert stuck.is_alive()
        process.send_signal(signal.SIGCONT)
        stuck.join()
        stop(process)  # every further call is local
        assert mpishare.open_handle(handle).tolist() == [42] * 4
        assert mpishare.open_handle(other).tolist() == [42] * 4


def test_a_forked_child_opens_by_itself(owner):
    _, handle = owner
    array = mpishare.open_handle(handle)
    assert in_a_fork(lambda: mpishare.open_handle(handle).tolist() == [42] * 4)
    assert mpishare.open_handle(handle) is not array
    assert array.tolist() == [42] * 4


@needs_two_users
def test_a_handle_that_leads_to_another_user_is_refused_before_a_word(owner):
    _, handle = owner
    address = f"mpishare/0/pool/{os.getpid() % 1000000:06d}"
    forged = handle[:16] + address.encode() + b"\0" + handle[16:].partition(b"\0")[2]
    with listening(address) as heard:
        with pytest.raises(mpishare.HandleError, match=f"by a process of another user, {NOBODY}"):
            mpishare.open_handle(forged)
        assert heard() == b"b''"

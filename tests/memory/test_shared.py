"""Shared memory of the host: reserved before it is touched, and nothing left of it."""

import errno
import gc
import mmap
import os
import signal
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpishare import HandleError, UnsupportedError
from mpishare.backends.host import HostBackend
from mpishare.memory import shared
from tests.helpers.children import python
from tests.helpers.held import held
from tests.helpers.planted import needs_two_users

PAGE = mmap.PAGESIZE


@pytest.fixture(autouse=True)
def nothing_is_left():
    gc.collect()
    before = held()
    yield
    gc.collect()
    assert (held().fds, held().mapped) == (before.fds, before.mapped)
    assert not held().names - before.names


def test_two_mappings_are_the_same_bytes():
    one = shared.create(100)
    name = shared.publish(one)
    other = shared.attach(name, 100)
    assert stat.S_IMODE(os.fstat(other.fd).st_mode) == 0o600
    shared.forget(name)
    one.buffer[5] = 77
    assert other.buffer[5] == 77
    one.close()
    other.buffer[6] = 78
    assert bytes(other.buffer[5:7]) == bytes([77, 78])
    other.close()


def test_name_is_gone_after_forget():
    memory = shared.create(1)
    name = shared.publish(memory)
    assert name in held().names
    shared.forget(name)
    shared.forget(name)
    with pytest.raises(HandleError, match=f"{name} is gone"):
        shared.attach(name, 1)
    memory.close()


@pytest.mark.parametrize(
    ("asked", "got"), [(0, PAGE), (1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE), (1 << 18, 1 << 18)]
)
def test_whole_pages_at_least_one_are_reserved(asked, got):
    """The whole has its room before it is touched: no SIGBUS later."""
    memory = shared.create(asked)
    assert memory.nbytes == len(memory.buffer) == got
    assert os.fstat(memory.fd).st_blocks * 512 >= got
    assert bytes(memory.buffer) == bytes(got)
    memory.close()
    memory.close()
    assert memory.fd == -1


PUBLISH = """
import os, signal, sys
from mpishare.memory import shared
shared.FOLDER = sys.argv[1]
print(shared.publish(shared.create(1)), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def folder(monkeypatch):
    """A folder of its own: tests beside this one look at what is left in that of the machine."""
    with tempfile.TemporaryDirectory(dir=shared.FOLDER) as folder:
        monkeypatch.setattr(shared, "FOLDER", folder)
        yield Path(folder)


def test_a_name_whose_process_was_killed_is_removed_and_no_other(folder):
    memory = shared.create(1)
    mine = shared.publish(memory)
    other = folder / "mpishare-unknown"
    other.touch()
    killed = python(PUBLISH, folder)
    name = killed.stdout.strip()
    assert killed.returncode == -signal.SIGKILL
    assert (folder / name).exists()
    shared.remove_abandoned()
    assert not (folder / name).exists()
    assert other.exists()
    shared.attach(mine, 1).close()
    shared.forget(mine)
    memory.close()


ANOTHER_USERS = """
import os, sys
from mpishare.memory import shared
shared.FOLDER = sys.argv[1]
os.setgid(65534)
os.setuid(65534)
shared.remove_abandoned()
"""


@needs_two_users
def test_a_name_of_another_user_is_left_alone(folder):
    folder.chmod(0o1777)
    name = python(PUBLISH, folder).stdout.strip()
    done = python(ANOTHER_USERS, folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / name).exists()


@pytest.mark.parametrize("part", [slice(None), slice(1, 3)], ids=["whole", "part"])
def test_an_array_keeps_its_memory(part):
    """Without it, reading the array after `close` is a segmentation fault."""
    before = held()
    backend = HostBackend()
    memory = backend.allocate(4 * PAGE)
    backend.retract(backend.publish(memory))
    assert not memory.is_held
    array = memory.array((8,), "i8")[part]
    array[...] = 5
    assert memory.is_held
    memory.close()
    gc.collect()
    # Asked before the array is looked at: the process would end there.
    assert held().mapped == before.mapped + 4 * PAGE
    assert set(array.tolist()) == {5}
    del array
    assert not memory.is_held
    gc.collect()
    assert held().mapped == before.mapped


def test_memory_smaller_than_needed_is_refused():
    memory = shared.create(PAGE)
    name = shared.publish(memory)
    with pytest.raises(HandleError, match=f"{PAGE} bytes where {PAGE + 1}"):
        shared.attach(name, PAGE + 1)
    shared.forget(name)
    memory.close()


def test_more_than_the_folder_has(monkeypatch):
    room = SimpleNamespace(f_bavail=16, f_blocks=64, f_frsize=PAGE)
    monkeypatch.setattr(shared.os, "statvfs", lambda path: room)
    shared.create(16 * PAGE).close()
    with pytest.raises(UnsupportedError, match=f"{17 * PAGE // 1024} KiB .*--shm-size"):
        shared.create(16 * PAGE + 1)


@pytest.mark.parametrize(
    ("code", "error", "why"),
    [(errno.ENOSPC, UnsupportedError, "--shm-size"), (errno.EIO, OSError, "Input/output")],
)
def test_an_error_while_pages_are_reserved(monkeypatch, code, error, why):
    """Room may be taken meanwhile; no other error is hidden."""

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(shared.os, "posix_fallocate", refuse)
    with pytest.raises(error, match=why):
        shared.create(PAGE)


LIMITED = """
import resource
from mpishare.memory import shared

def refused(kind, most, attempt):
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        attempt()
    except shared.UnsupportedError as error:
        print(error)
    finally:
        resource.setrlimit(kind, before)

MIB = 1 << 20
pages = int(open("/proc/self/statm").read().split()[0])
mapped = pages * resource.getpagesize() + MIB
pool = shared.create(8 * MIB, is_sparse=True)
name = shared.publish(pool)
refused(resource.RLIMIT_AS, mapped, lambda: shared.create(8 * MIB))
refused(resource.RLIMIT_AS, mapped, lambda: shared.attach(name, 8 * MIB))
shared.forget(name)
"""


def test_a_limit_of_the_process_is_not_taken_for_a_full_folder():
    said = python(LIMITED).stdout
    lines = said.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("cannot map 8 MiB of shared memory")
        assert "`ulimit -v`" in line
        assert "vm.max_map_count" in line
    assert "--shm-size" not in said


def test_naming_that_fails_leaves_nothing(monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(shared.os, "link", refuse)
    memory = shared.create(PAGE)
    with pytest.raises(UnsupportedError, match="Operation not permitted"):
        shared.publish(memory)
    memory.close()

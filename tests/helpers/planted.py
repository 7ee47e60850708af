"""What another user puts there under names like mpishare's: in /dev/shm, and at addresses."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.launch import SHM

KINDS = ("file", "folder", "FIFO", "socket", "link", "loop of links", "locked file")
NOBODY = 65534
needs_two_users = pytest.mark.skipif(os.geteuid() != 0, reason="it needs root for a second user")

_PROGRAM = """
import fcntl, os, socket, sys

os.chdir(sys.argv[1])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
os.umask(0)
file, folder, fifo, listener, link, loop, locked = sys.argv[3:]
os.mknod(file, 0o666)
os.mkdir(folder)
os.mkfifo(fifo)
socket.socket(socket.AF_UNIX).bind(listener)
os.symlink(fifo, link)
os.symlink(loop, loop)
os.mknod(locked, 0o666)
fcntl.flock(os.open(locked, os.O_RDWR), fcntl.LOCK_EX)
print("planted", flush=True)
sys.stdin.read()
"""


def names_in(folder: Path) -> set[str]:
    """The names there that look like mpishare's."""
    return {path.name for path in folder.glob("mpishare-*")}


@contextlib.contextmanager
def planted(folder: Path = SHM) -> Iterator[set[str]]:
    """A thing of each kind, which stay; the lock is held until the end, or that of this process."""
    names = [f"mpishare-1-{number:032x}" for number, _ in enumerate(KINDS)]
    command = [sys.executable, "-c", _PROGRAM, str(folder), str(NOBODY), *names]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={}
    ) as planter:
        assert planter.stdout.readline() == "planted\n"
        yield {*names}
        planter.stdin.close()


_LISTENER = """
import os, signal, socket, sys

address, uid, answers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.setgid(uid)
os.setuid(uid)
door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
door.bind(chr(0) + address)
door.listen()
print("in", flush=True)
connection, _ = door.accept()
asked = connection.recv(100)
print(asked, flush=True)
if asked and answers:
    socket.send_fds(connection, [b"{}"], [0] * answers)
signal.pause()
"""


@contextlib.contextmanager
def listening(
    address: str, uid: int = NOBODY, *, answers: int = 0
) -> Iterator[Callable[[], bytes]]:
    """A process of that user has an address, until the end; the value returns what it read there.

    It answers, if at all, with so many descriptors.
    """
    command = [sys.executable, "-c", _LISTENER, address, str(uid), str(answers)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as listener:
        assert listener.stdout.readline() == b"in\n"
        try:
            yield lambda: listener.stdout.readline().strip()
        finally:
            listener.kill()  # it may wait for a visitor

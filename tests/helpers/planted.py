"""What another user has at addresses like mpishare's."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

NOBODY = 65534
needs_two_users = pytest.mark.skipif(os.geteuid() != 0, reason="it needs root for a second user")

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

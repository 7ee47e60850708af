"""A word that the kernel marks when the thread that holds it ends."""

import ctypes
import mmap
import subprocess
import sys
import threading
import time

import pytest

from mpishare.coordination import robust_futex
from tests.helpers.launch import ROOT

HOLDER = """\
import ctypes, mmap, sys
from mpishare.coordination import robust_futex
with open(sys.argv[1], "r+b") as file:
    memory = mmap.mmap(file.fileno(), 4096)
with robust_futex.holding(ctypes.addressof(ctypes.c_char.from_buffer(memory))):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def word(tmp_path):
    """A file, and the address of its first word."""
    path = tmp_path / "word"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096) as memory:
        first = ctypes.c_uint32.from_buffer(memory)
        yield path, ctypes.addressof(first)
        del first


def value_of(address):
    return ctypes.c_uint32.from_address(address).value


@pytest.mark.parametrize("way", ["kill", "end"])
def test_who_waits_hears_of_the_holders_end(word, way):
    """Which marks the word where the holder is killed, and leaves 0 where it lets go."""
    path, address = word
    program = [sys.executable, "-c", HOLDER, path]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(program, cwd=ROOT, **pipes) as holder:
        assert holder.stdout.readline() == b"held\n"
        assert value_of(address) & ~(1 << 31) == holder.pid
        end = holder.kill if way == "kill" else holder.stdin.close
        threading.Timer(0.1, end).start()
        begin = time.monotonic()
        assert robust_futex.wait(address, 60.0)
        assert time.monotonic() - begin < 30
    assert bool(value_of(address) & robust_futex.DIED) == (way == "kill")
    assert value_of(address) & (robust_futex.DIED - 1) == 0
    assert robust_futex.wait(address, 0.01) == (way == "end")


def test_a_wait_ends_in_time_or_by_wake(word):
    _, address = word
    assert robust_futex.wait(address, 0.01)
    waiter = threading.Thread(target=robust_futex.wait, args=(address, 60.0))
    waiter.start()
    while waiter.is_alive():
        robust_futex.wake(address)
        waiter.join(0.001)


def test_a_machine_whose_system_calls_are_not_known(word, monkeypatch):
    monkeypatch.setattr(robust_futex, "_FUTEX", None)
    _, address = word
    with robust_futex.holding(address):
        assert value_of(address) == 0
        assert not robust_futex.wait(address, 60.0)
        robust_futex.wake(address)

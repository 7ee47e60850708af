"""Reading memory of another process: what cannot be read is told, and which process it was."""

import contextlib
import ctypes
import errno
import mmap
import os
import subprocess
import sys

import numpy as np

from mpishare.memory.process_memory import Token, try_read

PAGE = mmap.PAGESIZE
NO_PROCESS = 1 << 22  # Linux numbers processes up to one less


def at(array):
    return array.__array_interface__["data"][0]


def test_a_token():
    token = Token()
    pid, address, text = token.offer
    assert try_read(pid, address, text) == 0
    assert try_read(pid, address, text[::-1]) == errno.ESRCH  # that process is another here


class Pages:
    """Memory whose pages can be taken away one by one."""

    def __init__(self, count):
        self.memory = mmap.mmap(-1, count * PAGE)
        self.nbytes = count * PAGE
        self.begin = at(np.frombuffer(self.memory, "u1"))

    @contextlib.contextmanager
    def without(self, page):
        """The address of the page, which is not there until the end of the block."""
        address = self.begin + page * PAGE
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        assert protect(ctypes.c_void_p(address), PAGE, 0) == 0
        yield address
        assert protect(ctypes.c_void_p(address), PAGE, mmap.PROT_READ) == 0


def test_a_page_that_is_not_there():
    pages = Pages(2)
    with pages.without(1):
        for offset in (PAGE, PAGE - 8):  # where it ends early errno is as the one before left it
            assert try_read(NO_PROCESS, pages.begin, "") == errno.ESRCH
            assert try_read(os.getpid(), pages.begin + offset, "") == errno.EFAULT


def test_a_process_that_is_gone():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        assert try_read(process.pid, at(np.zeros(8)), "") == errno.ESRCH

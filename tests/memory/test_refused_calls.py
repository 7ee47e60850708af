"""System calls that a sandbox refuses: done without, or refused by name."""

import errno
import os
import platform

import pytest

from tests.helpers.children import python

# Of x86-64 and aarch64.
NUMBERS = {
    "linkat": (265, 37),
    "fallocate": (285, 47),
    "sched_yield": (24, 124),
    "eventfd2": (290, 19),
}
MACHINES = "x86_64", "aarch64"
# A filter of the kernel's, in a process of its own: a machine cannot take it back.
PROGRAM = """
import ctypes, struct, sys
from mpishare.coordination.poll import yield_core
from mpishare.errors import UnsupportedError
from mpishare.memory import hugepages, limits, shared
from mpishare.memory.fd_server import FdServer
from mpishare.memory.fd_client import fetch_fd

number, code, nbytes = map(int, sys.argv[1:])
LOAD, EQUALS, RETURN, ERRNO, ALLOW = 0x20, 0x15, 0x06, 0x50000, 0x7FFF0000
steps = (LOAD, 0, 0, 0), (EQUALS, 0, 1, number), (RETURN, 0, 0, ERRNO | code), (RETURN, 0, 0, ALLOW)
filter_ = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4, ctypes.addressof(filter_)))
libc = ctypes.CDLL(None)
assert not libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
assert not libc.prctl(22, 2, program, 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER

try:
    memory = shared.create(nbytes)
    pool = shared.create(nbytes, is_sparse=True)
    shared.reserve(pool, 0, nbytes)
    print(*(shared.os.fstat(each.fd).st_blocks * 512 for each in (memory, pool)))
    shared.forget(shared.publish(memory))
except UnsupportedError as error:
    print(error)
yield_core()
server = FdServer()
shared.os.close(fetch_fd(0, server.offer_fd(memory.fd), 5))
server.close()
print("all else is served")
"""
NBYTES = 5 << 20  # with huge pages in it, where there are any


@pytest.mark.skipif(platform.machine() not in MACHINES, reason="its numbers of calls are not here")
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
@pytest.mark.parametrize("call", NUMBERS)
def test_a_refused_call(call, code):
    number = NUMBERS[call][MACHINES.index(platform.machine())]
    done = python(PROGRAM, number, code, NBYTES)
    assert done.stderr == ""
    reserved, *refusal, last = done.stdout.splitlines()
    assert reserved == f"{NBYTES} {NBYTES}"  # or a touch could be SIGBUS
    assert last == "all else is served"
    if call == "linkat":
        assert f"the system refuses {call} ({os.strerror(code)})" in refusal[0]
        assert "seccomp" in refusal[0]
    else:
        assert refusal == []

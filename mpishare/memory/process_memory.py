"""Read memory of another process with ``process_vm_readv`` (cross-memory attach, CMA).

Linux allows it where it would allow a debugger: ptrace(2), "Ptrace access mode checking".
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_TOKEN_NBYTES = 16


class IoVec(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


@cache
def process_vm_readv() -> Callable[..., int]:
    """Return the system call as a function of C. Local."""
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    ranges = ctypes.POINTER(IoVec), ctypes.c_ulong
    read.argtypes = (ctypes.c_int, *ranges, *ranges, ctypes.c_ulong)
    read.restype = ctypes.c_ssize_t
    found: Callable[..., int] = read
    return found


def read_memory(pid: int, address: int, into: int, nbytes: int) -> int:
    """Copy memory of a process to an address of this one; return 0, or the error number. Local."""
    local, remote = IoVec(into, nbytes), IoVec(address, nbytes)
    count = process_vm_readv()(pid, local, 1, remote, 1, 0)
    if count == nbytes:
        return 0
    # A read that ends early met a page that cannot be read, and leaves errno as it was.
    return ctypes.get_errno() if count < 0 else errno.EFAULT


class Token:
    """Random bytes by which other processes try whether they can read the memory of this one.

    `offer` has its process id, their address, and the bytes in hexadecimal, valid for the life of
    this object.
    """

    def __init__(self) -> None:
        token = os.urandom(_TOKEN_NBYTES)
        self._memory = ctypes.create_string_buffer(token, _TOKEN_NBYTES)
        self.offer = os.getpid(), ctypes.addressof(self._memory), token.hex()


def try_read(pid: int, address: int, token: str) -> int | None:
    """Try to read a `Token`; return 0, the error number, or None for another process of that id."""
    found = ctypes.create_string_buffer(_TOKEN_NBYTES)
    error = read_memory(pid, address, ctypes.addressof(found), _TOKEN_NBYTES)
    if error:
        return error
    return 0 if found.raw.hex() == token else None

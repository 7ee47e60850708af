"""Read memory of another process with ``process_vm_readv`` (cross-memory attach, CMA).

Linux allows it where it would allow a debugger: ptrace(2), "Ptrace access mode checking".
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
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


class ProcessRead:
    """A read of so many bytes from another process, at addresses given with each call."""

    __slots__ = ("_local", "_pid", "_ranges", "_read", "_remote", "nbytes")

    def __init__(self, pid: int, nbytes: int) -> None:
        self._pid, self.nbytes = pid, nbytes
        self._read = process_vm_readv()
        self._local, self._remote = IoVec(0, nbytes), IoVec(0, nbytes)
        self._ranges = ctypes.pointer(self._local), ctypes.pointer(self._remote)

    def __call__(self, source: int, target: int) -> int:
        """Copy from an address there to one here; return 0, or the error number."""
        self._remote.address, self._local.address = source, target
        local, remote = self._ranges
        count = self._read(self._pid, local, 1, remote, 1, 0)
        if count == self.nbytes:
            return 0
        if count <= 0:
            return ctypes.get_errno() or errno.EFAULT
        # One call reads at most 2 GiB, and stops before a page that cannot be read.
        return ProcessRead(self._pid, self.nbytes - count)(source + count, target + count)


class Token:
    """Random bytes by which other processes try whether they can read the memory of this one.

    `offer` has its process id, their address, and the bytes in hexadecimal, valid for the life of
    this object.
    """

    def __init__(self) -> None:
        token = secrets.token_bytes(_TOKEN_NBYTES)
        self._memory = ctypes.create_string_buffer(token, _TOKEN_NBYTES)
        self.offer = os.getpid(), ctypes.addressof(self._memory), token.hex()


def try_read(pid: int, address: int, token: str) -> int | None:
    """Try to read a `Token`; return 0, the error number, or None for another process of that id."""
    found = ctypes.create_string_buffer(_TOKEN_NBYTES)
    error = ProcessRead(pid, _TOKEN_NBYTES)(address, ctypes.addressof(found))
    return error if error or found.raw.hex() == token else None

"""Read memory of another process with ``process_vm_readv`` (cross-memory attach, CMA).

Linux allows it where it would allow a debugger: ptrace(2), "Ptrace access mode checking".
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.memory.memory import address_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_TOKEN_NBYTES = 16
_IOV_MAX = 1024  # ranges in one system call


class _IoVec(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
_RANGES = ctypes.POINTER(_IoVec), ctypes.c_ulong
_readv.argtypes = (ctypes.c_int, *_RANGES, *_RANGES, ctypes.c_ulong)
_readv.restype = ctypes.c_ssize_t


def read_memory(pid: int, address: int, into: int, nbytes: int) -> int:
    """Copy memory of a process to an address of this one; return 0, or the error number. Local."""
    local, remote = _IoVec(into, nbytes), _IoVec(address, nbytes)
    count = _readv(pid, local, 1, remote, 1, 0)
    if count == nbytes:
        return 0
    # A read that ends early met a page that cannot be read, and leaves errno as it was.
    return ctypes.get_errno() if count < 0 else errno.EFAULT


class ReadTrial:
    """Tries to read a byte at so many addresses of this one, as another process would."""

    def __init__(self, count: int) -> None:
        self._ranges = np.ones((count, 2), np.uint64)  # addresses, each with a byte
        self._found = np.empty(_IOV_MAX, np.uint8)
        self._pid = os.getpid()
        self._calls = []
        for first in range(0, count, _IOV_MAX):
            some = self._ranges[first : first + _IOV_MAX]
            remote = ctypes.cast(address_of(some), ctypes.POINTER(_IoVec))
            self._calls.append((_IoVec(address_of(self._found), len(some)), remote, len(some)))

    def at(self, offsets: np.ndarray[Any, Any], address: int = 0) -> bool:
        """Whether it succeeds at all offsets from an address."""
        np.add(offsets, address, out=self._ranges[:, 0], casting="unsafe")
        return all(
            _readv(self._pid, local, 1, remote, count, 0) == count
            for local, remote, count in self._calls
        )


class Token:
    """Random bytes by which other processes try whether they can read the memory of this one.

    `offer` has its process id, their address, and the bytes in hexadecimal, valid for the life of
    this object.
    """

    def __init__(self) -> None:
        token = os.urandom(_TOKEN_NBYTES)
        self._memory = ctypes.create_string_buffer(token, _TOKEN_NBYTES)
        self.offer = os.getpid(), ctypes.addressof(self._memory), token.hex()


def try_read(pid: int, address: int, token: str) -> int:
    """Try to read a `Token`; return 0, or the error number: ESRCH where the id is another's."""
    found = ctypes.create_string_buffer(_TOKEN_NBYTES)
    error = read_memory(pid, address, ctypes.addressof(found), _TOKEN_NBYTES)
    return error or (0 if found.raw.hex() == token else errno.ESRCH)


def why_unreadable(offers: Sequence[tuple[int, int, str]], rank: int) -> list[tuple[int, str]]:
    """Return the ranks whose memory this one cannot read, given the offers of all, and why not."""
    errors = ((owner, try_read(*each)) for owner, each in enumerate(offers) if owner != rank)
    return [(owner, os.strerror(error)) for owner, error in errors if error]

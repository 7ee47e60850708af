"""A robust futex: a word of shared memory that the kernel marks when the thread that holds it ends.

The kernel marks it before it frees the memory of a killed process, which takes milliseconds, and
before it closes the files: by these a launcher learns of the death, and then kills the survivors.
Where the kernel has no such list, or its memory was taken by force, the word is never marked.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

DIED = 1 << 30
_WAITERS = 1 << 31  # without it the kernel wakes no thread
_WAIT, _WAKE, _ALL = 0, 1, 0x7FFFFFFF
# Numbers of system calls that the C library has no functions for.
_FUTEX, _SET_ROBUST_LIST, _GET_ROBUST_LIST = {
    "x86_64": (202, 273, 274),
    "aarch64": (98, 99, 100),
}.get(platform.machine(), (None, None, None))
_syscall = ctypes.CDLL(None, use_errno=True).syscall


class _Held(ctypes.Structure):
    """The kernel's list of a thread's robust futexes: here one word, at `offset` from `entry`."""

    _fields_ = (
        ("first", ctypes.c_void_p),
        ("offset", ctypes.c_ssize_t),
        ("pending", ctypes.c_void_p),
        ("entry", ctypes.c_void_p),
    )
    HEAD_NBYTES = ctypes.c_size_t(3 * ctypes.sizeof(ctypes.c_void_p))


class _Duration(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


@contextmanager
def holding(address: int) -> Iterator[None]:
    """Hold the word at an address during the block, so that the end of its thread marks it.

    Meanwhile the thread can hold no robust mutex: the C library's own list is put aside.
    """
    held, word = _Held(), ctypes.c_uint32.from_address(address)
    held.first = ctypes.addressof(held) + _Held.entry.offset
    held.offset = address - held.first
    held.entry = ctypes.addressof(held)
    before, nbytes = ctypes.c_void_p(), ctypes.c_size_t()
    is_held = (
        _FUTEX is not None
        and not _syscall(_GET_ROBUST_LIST, 0, ctypes.byref(before), ctypes.byref(nbytes))
        and not _syscall(_SET_ROBUST_LIST, ctypes.byref(held), _Held.HEAD_NBYTES)
    )
    word.value = threading.get_native_id() | _WAITERS if is_held else 0
    try:
        yield
    finally:
        word.value = 0
        if is_held:
            _syscall(_SET_ROBUST_LIST, before, nbytes)
            wake(address)


def wait(address: int, timeout_s: float) -> bool:
    """Wait until a word is marked or woken; False if the system cannot wait."""
    if _FUTEX is None:
        return False
    value = ctypes.c_uint32.from_address(address).value
    if value & DIED:
        return True
    timeout = _Duration(int(timeout_s), int(timeout_s % 1 * 1e9))
    failed = _syscall(
        _FUTEX, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(value), ctypes.byref(timeout)
    )
    return not failed or ctypes.get_errno() in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)


def wake(address: int) -> None:
    if _FUTEX is not None:
        _syscall(_FUTEX, ctypes.c_void_p(address), _WAKE, ctypes.c_int(_ALL))

"""Map an open file so that the kernel can back it with huge pages, and ask it to.

A halo is cut out of rows that lie pages apart: with small pages each of them takes a walk through
the page table, which costs more than the copy. A huge page (2 MiB on x86-64) holds hundreds of
rows. The kernel maps a file's huge pages as such only where address and offset agree in their lower
bits, which only a mapping at an address of our choice guarantees.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("mpishare.window")

# From the kernel's headers; mmap has no name for them before Python 3.13 (MAP_NORESERVE) or at all.
_MAP_FIXED, _MAP_NORESERVE, _MADV_COLLAPSE = 0x10, 0x4000, 25
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_int64]
_mremap = _libc.mremap
_mremap.restype = ctypes.c_void_p
_mremap.argtypes = [ctypes.c_void_p, *2 * [ctypes.c_size_t], ctypes.c_int, ctypes.c_void_p]
_mprotect = _libc.mprotect
_mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
# Not the method of Python's mmap, which holds Python's lock and so stops the watchdog's thread.
_madvise = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@functools.cache
def huge_nbytes() -> int:
    """Return the size of a huge page, 0 where the kernel has none."""
    try:
        return int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    except OSError:
        return 0


def map_file(
    fd: int, nbytes: int, offset: int = 0, *, is_writable: bool = True
) -> tuple[mmap.mmap, memoryview]:
    """Map whole pages of a file, shared; for huge pages `offset` is a multiple of their size.

    Returns the holder of the addresses, unmapped by its `close` or with the last view of it, and
    the bytes of the file.
    """
    protection = _PROTECTION if is_writable else mmap.PROT_READ
    flags = mmap.MAP_SHARED | _MAP_FIXED
    return _map_over(
        nbytes, is_writable, lambda at: _mmap(at, nbytes, protection, flags, fd, offset)
    )


def duplicate(
    address: int, fd: int, nbytes: int, offset: int, *, is_writable: bool
) -> tuple[mmap.mmap, memoryview]:
    """Map whole pages that are mapped, shared, at an address a second time; as `map_file`."""
    del fd, offset  # the kernel takes both from the mapping
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
    return _map_over(nbytes, is_writable, lambda at: _mremap(address, 0, nbytes, flags, at))


def _map_over(
    nbytes: int, is_writable: bool, place: Callable[[int], Any]
) -> tuple[mmap.mmap, memoryview]:
    """Let `place` map over addresses that are held for it."""
    huge = huge_nbytes()
    slack = huge if huge and nbytes >= huge else 0
    # Shared, which no limit on a process's own memory counts.
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    held = mmap.mmap(-1, nbytes + slack, flags=flags, prot=_PROTECTION)
    try:
        start = _address(held)
        skipped = -start % slack if slack else 0
        _check(place(start + skipped) == start + skipped)
        view = memoryview(held)[skipped : skipped + nbytes]
        return held, view if is_writable else view.toreadonly()
    except BaseException:
        held.close()
        raise


def protect(address: int, nbytes: int) -> None:
    """Make mapped whole pages read-only."""
    _check(not _mprotect(address, nbytes, mmap.PROT_READ))


def make_huge(fd: int, view: memoryview, offset: int = 0) -> None:
    """Put huge pages under bytes of a file that have no page yet, as far as there are huge pages.

    Where there are none (Linux before 6.1, fragmented memory) small ones serve as well, only
    slower; the caller reserves the missing ones. One small page of each is reserved first, since
    the kernel collapses no empty range; this is faster than filling the file with small ones.
    Raises `OSError` if there is no room for these pages.
    """
    huge = huge_nbytes()
    count = len(view) // huge if huge else 0
    if not count:
        return
    for number in range(count):
        os.pwrite(fd, b"\0", offset + number * huge)
    if _madvise(_address(view), count * huge, _MADV_COLLAPSE):
        why = os.strerror(ctypes.get_errno())
        log.debug("no huge pages for %d bytes of shared memory: %s", len(view), why)


def _address(buffer: mmap.mmap | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _check(is_done: bool) -> None:
    if not is_done:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))

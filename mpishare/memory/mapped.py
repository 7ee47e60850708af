"""Shared memory that other code mapped: the file behind it, and how other ranks map it.

A file is known by its line in /proc/self/maps: device, inode and path. `stat` may report other
numbers than that line (overlayfs, btrfs), so a file that was opened is mapped for a moment, and
the two lines are compared. /proc/self/map_files is for privileged users alone. Instead of it, a
process that maps a file which has no name any more, as those of MPI's shared windows, maps it
once more out of its own mapping.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import stat
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpishare.errors import UnsupportedError
from mpishare.memory.kinds import COPY, PRIVATE, UNNAMED, Refusal
from mpishare.memory.memory import host_anchor
from mpishare.memory.shared import FOLDER, SharedMemory, duplicate, map_file, whole_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_OF_MPICH = re.compile(rf"{FOLDER}/mpich_shm_\w+")
_SYSTEM_V = "/SYSV"  # how the kernel begins the names of its segments


class _Line(NamedTuple):
    """A line of /proc/self/maps."""

    start: int
    end: int
    flags: str  # rwx, and s or p
    offset: int  # of `start` in the file
    file: str  # device, inode and path; of System V, its namespace is in the device


class FilePart(NamedTuple):
    """The place of an array in a file."""

    file: str  # as in `_Line`
    offset: int

    @property
    def path(self) -> str:
        return self.file.split(" ", 2)[2]


def remove_files_of_mpi() -> None:
    """Remove the names of MPICH's files in /dev/shm that this process has mapped.

    For a job that is about to be aborted, which leaves 1 MiB per rank there. All ranks of the
    machine have mapped them since `MPI_Init`, and `MPI_Finalize` does not miss them.
    """
    with contextlib.suppress(OSError):
        for path in {FilePart(line.file, 0).path for line in _lines()}:
            if _OF_MPICH.fullmatch(path):
                with contextlib.suppress(OSError):
                    Path(path).unlink()


def _lines() -> Iterator[_Line]:
    # A name may have a carriage return in it; the kernel escapes line feeds alone.
    with Path("/proc/self/maps").open(errors="surrogateescape", newline="\n") as maps:
        for text in maps:
            span, flags, offset, device, inode, *rest = text.rstrip("\n").split(" ", 5)
            start, end = (int(bound, 16) for bound in span.split("-"))
            path = "".join(rest).lstrip()
            if path.startswith(_SYSTEM_V):
                device += _ipc_namespace()
            file = " ".join([device, inode, path])
            yield _Line(start, end, flags, int(offset, 16), file)


def _ipc_namespace() -> str:
    """Return the namespace in which numbers of System V segments, their inodes, are unique."""
    with contextlib.suppress(OSError):
        return str(Path("/proc/self/ns/ipc").readlink())
    return ""


def _covering(address: int, nbytes: int) -> list[_Line]:
    """Return the mappings of these bytes: none if a part of them is not mapped.

    They are several where `mprotect` cut one into pieces that continue each other.
    """
    parts, at = list[_Line](), address
    for line in _lines():
        if line.start <= at < line.end:
            parts.append(line)
            at = line.end
        if at >= address + nbytes:
            return parts
    return []


def find(address: int, nbytes: int, *, is_writable: bool) -> FilePart | Refusal:
    """Return the file behind bytes of this process, or why no other process can map them."""
    parts = _covering(address, nbytes)
    if not parts or "/" not in parts[0].file:
        return PRIVATE
    first = parts[0]
    part = FilePart(first.file, address - first.start + first.offset)
    if any("s" not in part.flags for part in parts):
        return Refusal(
            f"it is a private mapping of {part.path}, whose writes no other process sees",
            f"Map the file shared (numpy.memmap with mode 'r+' or 'r'), {COPY}",
        )
    begins = {(part.file, part.start - part.offset) for part in parts}
    if len(begins) > 1 or (is_writable and any("w" not in part.flags for part in parts)):
        return Refusal("it lies in several mappings that differ", f"Share parts of it, {COPY}")
    return part


def open_again(part: FilePart, nbytes: int, *, is_writable: bool) -> int | None:
    """Return a new descriptor of a file that this process maps; None if it finds no way to it.

    It is opened by its name, or by a descriptor of it that this process still has.
    """
    flags = (os.O_RDWR if is_writable else os.O_RDONLY) | os.O_CLOEXEC
    names = [part.path]
    with os.scandir("/proc/self/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # that of the scan itself has gone
                names += [entry.path] * (str(Path(entry.path).readlink()) == part.path)
    for name in names:
        try:
            if not stat.S_ISREG(Path(name).stat().st_mode):
                continue  # to open a device has effects of its own
            fd = os.open(name, flags | os.O_NONBLOCK)  # of a FIFO too, put there since
            is_found = False
            try:
                is_found = _is_behind(fd, part, nbytes)
            finally:
                if not is_found:
                    os.close(fd)
            if is_found:
                return fd
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise  # it may be the file
    return None


def _is_behind(fd: int, part: FilePart, nbytes: int) -> bool:
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode) or facts.st_size < part.offset + nbytes:
        return False
    with mmap.mmap(fd, 1, prot=mmap.PROT_READ) as mapping:
        anchor = host_anchor(mapping)
        start = anchor.ctypes.data
        del anchor  # it would keep the mapping
        return any(line.start == start and line.file == part.file for line in _lines())


def map_part(
    fd: int, part: FilePart, nbytes: int, *, is_writable: bool
) -> tuple[SharedMemory, int]:
    """Map a file of another rank; return it with the array's offset there. Closes the file."""
    size = os.fstat(fd).st_size
    if size < part.offset + nbytes:
        os.close(fd)
        raise UnsupportedError(
            f"{part.path} was truncated to {size} bytes: the array ends at byte "
            f"{part.offset + nbytes}"
        )
    return _map(part, nbytes, fd, partial(map_file, is_writable=is_writable))


def map_twin(part: FilePart, nbytes: int, *, is_writable: bool) -> tuple[SharedMemory, int]:
    """Map a file as `map_part`, out of a mapping that this process has of it already.

    Raises `UnsupportedError` if it has none.
    """
    for line in _lines():
        begin = part.offset - line.offset
        is_there = line.file == part.file and 0 <= begin <= line.end - line.start - nbytes
        if is_there and line.flags[3] == "s" and (line.flags[1] == "w" or not is_writable):
            start = line.start + begin - part.offset % mmap.PAGESIZE
            twin = partial(duplicate, start, is_writable=is_writable)
            return _map(part, nbytes, -1, twin)
    raise UnsupportedError(f"cannot map {part.path}: {UNNAMED.why}. {UNNAMED.remedy}.")


def _map(
    part: FilePart, nbytes: int, fd: int, map_: Callable[..., Any]
) -> tuple[SharedMemory, int]:
    """Map the whole pages around a part."""
    skipped = part.offset % mmap.PAGESIZE
    try:
        memory = SharedMemory(fd, whole_pages(skipped + nbytes), part.offset - skipped, map_)
    except OSError as error:
        raise UnsupportedError(f"cannot map {part.path}: {error.strerror}") from error
    memory.close_file()
    return memory, skipped

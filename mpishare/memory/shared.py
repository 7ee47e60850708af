"""Host memory that several processes map: a file in /dev/shm that has a name for a moment only.

Why not an MPI shared window: an array of a freed window is a segmentation fault, a window larger
than /dev/shm is made without complaint and kills the process at the first touch, and `Win.Free`
cannot be called once a rank is gone. A file that is unlinked as soon as every rank has opened it
has none of these: its room is reserved before anyone touches it, and it lives as long as somebody
maps it. A process that is killed in the instant between name and unlink leaves a file behind: the
lock that it held is gone then, by which others know that they may remove it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpishare.errors import HandleError, UnsupportedError, format_nbytes
from mpishare.memory import limits
from mpishare.memory.handle import boot_id
from mpishare.memory.hugepages import make_huge, map_file

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = "/dev/shm"  # noqa: S108  the shared memory of a Linux machine, not a scratch folder
_NOT_USABLE = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EOPNOTSUPP,  # a file system without files that have no name, which says so,
    errno.EISDIR,  # or one that does not know of them
)
_NAME = re.compile(r"mpishare-[0-9]+-[0-9a-f]{32}")


def place() -> list[Any] | None:
    """Return what tells machines and containers apart; None without a /dev/shm. Local.

    The running kernel, and the device and the inode of the folder: a container may have been given
    a folder inside the /dev/shm of its machine. Processes of one place can map the same host
    memory.
    """
    try:
        folder = Path(FOLDER).stat()
        return [boot_id(), folder.st_dev, folder.st_ino]
    except OSError:
        return None


class SharedMemory:
    """Bytes of an open file that this process maps.

    Attributes
    ----------
    nbytes : int, bytes
        Size of the mapping, a multiple of the page size.
    buffer : memoryview
        The bytes. Views of it keep them mapped.
    fd : int
        The open file, for locks.
    """

    def __init__(self, fd: int, nbytes: int, offset: int = 0) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self._offset = offset
        try:
            self._mapping, self.buffer = map_file(fd, nbytes, offset)
        except BaseException:
            os.close(fd)
            raise

    @property
    def address(self) -> int:
        """Where the first byte is mapped."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))

    def close_file(self) -> None:
        """Close the file; the mapping stays. Local, may be repeated."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        """Close the file and unmap. Local.

        Where views of the buffer are alive, the memory goes with this object and the last of them.
        """
        self.close_file()
        with contextlib.suppress(BufferError):
            self.buffer.release()
            self._mapping.close()


def create(nbytes: int, *, is_sparse: bool = False) -> SharedMemory:
    """Make zeroed shared memory without a name, and reserve its pages. Local.

    Parameters
    ----------
    nbytes : int, bytes
        Rounded up to whole pages; at least one.
    is_sparse : bool
        No page is reserved: `reserve` each before it is touched.

    Raises
    ------
    UnsupportedError
        If /dev/shm, the machine or a memory limit has not that much left, or if no file can be
        made there. Nothing has been touched by then.
    """
    nbytes = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    with _usable_folder():
        fd = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, nbytes)
        if not is_sparse:
            return reserve_part(fd, 0, nbytes)
        with _no_room_is_said(nbytes):
            return SharedMemory(os.dup(fd), nbytes)
    finally:
        os.close(fd)


def reserve_part(fd: int, offset: int, nbytes: int) -> SharedMemory:
    """Reserve and map whole pages of a file of shared memory. Local.

    Raises
    ------
    UnsupportedError
        As `create`.
    """
    with _room_for(nbytes):
        memory = SharedMemory(os.dup(fd), nbytes, offset)
        try:
            make_huge(fd, memory.buffer, offset)
            os.posix_fallocate(fd, offset, nbytes)
        except BaseException:
            memory.close()
            raise
    return memory


def reserve(memory: SharedMemory, start: int, nbytes: int) -> None:
    """Take some pages of sparse memory, so that their first touch cannot be SIGBUS. Local.

    Parameters
    ----------
    memory : SharedMemory
        Whose file is open.
    start, nbytes : int, bytes
        Whole pages.

    Raises
    ------
    UnsupportedError
        As `create`.
    """
    with _room_for(nbytes):
        os.posix_fallocate(memory.fd, start, nbytes)


@contextlib.contextmanager
def _room_for(nbytes: int) -> Iterator[None]:
    """Look whether there is room before it is taken, and say where there turned out to be none."""
    _check_room(nbytes)
    with _no_room_is_said(nbytes):
        yield


@contextlib.contextmanager
def _no_room_is_said(nbytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise _no_room(nbytes, free_nbytes()) from error
        raise


def publish(memory: SharedMemory) -> str:
    """Give memory a name under which others can `attach` it, until `forget`. Local.

    A step of its own, so that the name is there for a moment only: what is killed while pages are
    reserved, or filled, leaves nothing behind. The file stays open until `forget`, since its lock
    says that this process is alive.
    """
    fcntl.flock(memory.fd, fcntl.LOCK_EX)
    name = f"mpishare-{os.getpid()}-{secrets.token_hex(16)}"
    # A folder descriptor makes Python call linkat, which follows the link in /proc.
    with _usable_folder():
        folder = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.link(f"/proc/self/fd/{memory.fd}", name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            os.close(folder)
    return name


def attach(name: str, nbytes: int) -> SharedMemory:
    """Map the memory that another process of this machine created. Local.

    Raises
    ------
    HandleError
        If the name is none of `create`'s, or if the memory is smaller than `nbytes`.
    OSError
        If there is no such memory here.
    """
    fd = open_file(name, os.O_RDWR)
    size = os.fstat(fd).st_size
    if size < nbytes:
        os.close(fd)
        raise HandleError(f"shared memory of {size} bytes where {nbytes} bytes are needed")
    return SharedMemory(fd, size)


def open_file(name: str, flags: int) -> int:
    """Return a descriptor of the file behind a name. Local; raises as `attach`."""
    if not _NAME.fullmatch(name):
        raise HandleError(f"{name!r} is not a name of shared memory")
    return os.open(f"{FOLDER}/{name}", flags | os.O_CLOEXEC)


def forget(name: str) -> None:
    """Remove the name; the memory lives on as long as it is mapped. May be repeated."""
    Path(FOLDER, name).unlink(missing_ok=True)


def remove_abandoned() -> None:
    """Remove the names of processes that were killed before they could `forget` them. Local.

    The kernel ends a lock with its process, whatever PID namespace that was in.
    """
    for path in Path(FOLDER).glob("mpishare-*"):
        if not _NAME.fullmatch(path.name):
            continue
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            continue  # forgotten meanwhile, or another user's
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            pass  # being attached to
        finally:
            os.close(fd)


@contextlib.contextmanager
def _usable_folder() -> Iterator[None]:
    """Say what to do where the folder is not there, is read-only, or belongs to somebody else."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NOT_USABLE:
            raise
        raise UnsupportedError(
            f"cannot make shared memory in {FOLDER}: {error.strerror}. The ranks of a machine "
            "share host memory there, on a tmpfs in which this user may write. Mount one with "
            f"`mount -t tmpfs -o mode=1777 tmpfs {FOLDER}`; start a container with --shm-size=SIZE "
            "or --ipc=host."
        ) from error


def _check_room(nbytes: int) -> None:
    free = free_nbytes()
    if nbytes > free:
        raise _no_room(nbytes, free)
    available = available_nbytes()
    if nbytes > available:
        raise UnsupportedError(
            f"cannot reserve {format_nbytes(nbytes)} of shared memory: this machine has "
            f"{format_nbytes(available)} of memory left. Ask for less, or run on more nodes."
        )
    limit = limits.tightest()
    if limit is not None and nbytes > limit.left:
        raise UnsupportedError(
            f"cannot reserve {format_nbytes(nbytes)} of shared memory: this job or container may "
            f"use {format_nbytes(limit.nbytes)} of memory on this machine, shared memory included, "
            f"and has {format_nbytes(limit.left)} left (control group {limit.group}). Ask for "
            "more: --mem=SIZE in SLURM, --memory=SIZE for a container."
        )


def free_nbytes() -> int:
    """Return how many bytes /dev/shm has left. Local."""
    room = os.statvfs(FOLDER)
    return room.f_bavail * room.f_frsize


def _no_room(nbytes: int, free: int) -> UnsupportedError:
    return UnsupportedError(
        f"cannot reserve {format_nbytes(nbytes)} of shared memory: {FOLDER} has "
        f"{format_nbytes(free)} "
        "left. In a container, start it with --shm-size=SIZE (Docker's default is 64 MiB) or "
        f"--ipc=host; else enlarge it with `mount -o remount,size=SIZE {FOLDER}`."
    )


def available_nbytes() -> int:
    """Return how much memory this machine has left."""
    meminfo = Path("/proc/meminfo").read_text()
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    return int(match[1]) * 1024 if match else 1 << 62

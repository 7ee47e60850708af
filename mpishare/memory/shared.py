"""Host memory that several processes map: a file in /dev/shm that has a name for a moment only.

Why not an MPI shared window: an array of a freed window is a segmentation fault, a window larger
than /dev/shm is made without complaint and kills the process at the first touch, and `Win.Free`
cannot be called once a rank is gone. A file that is unlinked as soon as every rank has opened it
has none of these problems: its room is reserved before the first touch, and it lives as long as any
process maps it. A process that is killed in the instant between name and unlink leaves a file
behind: its lock is gone then, so others may remove the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import resource
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpishare.errors import HandleError, UnsupportedError, format_nbytes
from mpishare.memory import limits
from mpishare.memory.handle import boot_id
from mpishare.memory.hugepages import make_huge, map_file, protect
from mpishare.memory.memory import host_anchor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger("mpishare.node")

FOLDER = "/dev/shm"  # noqa: S108  the shared memory of a Linux machine, not a scratch folder
MORE_ROOM = (
    "In a container, start it with --shm-size=SIZE (Docker's default is 64 MiB) or --ipc=host; "
    f"else enlarge it with `mount -o remount,size=SIZE {FOLDER}`."
)
_REFUSED = errno.EPERM, errno.ENOSYS  # a system call, as by a sandbox
_LITTLE_NBYTES = 48 << 20
_NOT_USABLE = (
    *_REFUSED,
    errno.EACCES,
    errno.EROFS,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EOPNOTSUPP,  # a file system without files that have no name, which reports that,
    errno.EISDIR,  # or one that does not know of them
)
_NAME = re.compile(r"mpishare-[0-9]+-[0-9a-f]{32}")
# The time limit of `remove_abandoned`: other users can make any number of such names, while the
# other ranks wait for this one.
_CLEANING_S = 0.5
_NAMES_PER_LOOK = 64  # at the clock
# The close of any descriptor of a file ends the process's record locks on it. So no thread opens a
# file that has one, and none is taken while a thread has a file open for a moment.
_opening = threading.RLock()  # which a handler of a signal may meet in its own thread
_locked: set[int] = set()  # inodes of the folder


def place() -> list[Any] | None:
    """Return the identity of this machine and container; None without a /dev/shm.

    The running kernel, and the device and the inode of the folder: a container may have been given
    a folder inside the /dev/shm of its machine. Processes with the same identity can map the same
    host memory.
    """
    try:
        folder = Path(FOLDER).stat()
        return [boot_id(), folder.st_dev, folder.st_ino]
    except OSError:
        return None


class SharedMemory:
    """Bytes of an open file that this process maps; a multiple of the page size.

    Views of `buffer` keep them mapped; `fd` stays open for locks.
    """

    def __init__(
        self, fd: int, nbytes: int, offset: int = 0, map_: Callable[..., Any] = map_file
    ) -> None:
        self.fd: int = fd  # -1 for none
        self.nbytes = nbytes
        self.buffer: memoryview
        try:
            self._mapping, self.buffer = map_(fd, nbytes, offset)
        except BaseException as error:
            self.close_file()
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                raise _refused("map", nbytes, _no_addresses()) from error
            raise

    @property
    def address(self) -> int:
        return int(host_anchor(self.buffer).ctypes.data)

    def lock(self, at: int) -> None:
        """Lock a byte of the file, or behind it, until it is closed or the process ends.

        A record lock, which a forked child does not inherit: it would outlive its parent there.
        """
        with _opening:
            _locked.add(os.fstat(self.fd).st_ino)
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)

    def protect(self) -> None:
        """Let this process only read the mapping: a store that no library refuses is SIGSEGV."""
        protect(self.address, self.nbytes)

    def close_file(self) -> None:
        """Close the file; the mapping stays. May be repeated."""
        if self.fd >= 0:
            _locked.discard(os.fstat(self.fd).st_ino)
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        """Close the file and unmap.

        Where views of the buffer are alive, the memory goes with this object and the last of them.
        """
        self.close_file()
        with contextlib.suppress(BufferError):
            self.buffer.release()
            self._mapping.close()


def create(nbytes: int, *, is_sparse: bool = False) -> SharedMemory:
    """Make zeroed shared memory without a name, of whole pages, and reserve them.

    Sparse memory has no page reserved: `reserve` each before it is touched. Raises
    `UnsupportedError` if /dev/shm, the machine or a limit has not that much left, or if no file can
    be made there; no page has been touched by then.
    """
    nbytes = whole_pages(nbytes)
    with _usable_folder("open"):
        fd = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        with _explained(nbytes):
            os.ftruncate(fd, nbytes)
        return SharedMemory(os.dup(fd), nbytes) if is_sparse else reserve_part(fd, 0, nbytes)
    finally:
        os.close(fd)


def whole_pages(nbytes: int) -> int:
    return -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


def reserve_part(fd: int, offset: int, nbytes: int) -> SharedMemory:
    """Reserve and map whole pages of a file of shared memory. Raises as `create`."""
    with _room_for(nbytes):
        memory = SharedMemory(os.dup(fd), nbytes, offset)
        try:
            make_huge(fd, memory.buffer, offset)
            _reserve_pages(fd, offset, nbytes)
        except BaseException:
            memory.close()
            raise
    return memory


def reserve(memory: SharedMemory, start: int, nbytes: int) -> None:
    """Reserve whole pages of sparse memory with an open file, so that their first touch cannot be
    SIGBUS.

    Raises as `create`.
    """
    with _room_for(nbytes):
        _reserve_pages(memory.fd, start, nbytes)


def _reserve_pages(fd: int, start: int, nbytes: int) -> None:
    """Reserve whole pages of a file that nothing was written to."""
    try:
        os.posix_fallocate(fd, start, nbytes)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        for at in range(start, start + nbytes, mmap.PAGESIZE):  # a write reserves its page
            os.pwrite(fd, b"\0", at)


@contextlib.contextmanager
def _room_for(nbytes: int) -> Iterator[None]:
    """Check for room before it is taken, and explain a lack of it that the check did not see."""
    _check_room(nbytes)
    with _explained(nbytes):
        yield


@contextlib.contextmanager
def _explained(nbytes: int) -> Iterator[None]:
    """Raise the kernel's refusal of room as an error with its reason and remedy."""
    try:
        yield
    except OSError as error:
        if why := _why_no_room(nbytes, error.errno or 0):
            raise _refused("reserve", nbytes, why) from error
        raise


def _refused(verb: str, nbytes: int, why: str) -> UnsupportedError:
    return UnsupportedError(f"cannot {verb} {format_nbytes(nbytes)} of shared memory: {why}")


def publish(memory: SharedMemory) -> str:
    """Give memory a name under which others can `attach` it, until `forget`.

    A step of its own, so that the name is there for a moment only: a process killed while it
    reserves or fills pages leaves no file behind. The file stays open until `forget`, since its
    lock shows that this process is alive.
    """
    with _usable_folder("flock"):
        fcntl.flock(memory.fd, fcntl.LOCK_EX)
    name = f"mpishare-{os.getpid()}-{os.urandom(16).hex()}"
    # A folder descriptor makes Python call linkat, which follows the link in /proc.
    with _usable_folder("linkat"):
        folder = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.link(f"/proc/self/fd/{memory.fd}", name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            os.close(folder)
    return name


def attach(name: str, nbytes: int) -> SharedMemory:
    """Map the memory that another process of this machine created.

    Raises `HandleError` if there is no file of `publish` with that name, or one of another size
    than `nbytes`, and `PermissionError` if it is another user's.
    """
    fd = open_file(name, os.O_RDWR)
    size = os.fstat(fd).st_size
    if size != whole_pages(nbytes):
        os.close(fd)
        raise HandleError(f"shared memory of {size} bytes where {nbytes} bytes are needed")
    return SharedMemory(fd, size)


def open_file(name: str, flags: int) -> int:
    """Return a descriptor of the file behind a name. Raises as `attach`.

    Any user of the machine may put a FIFO, a device or a link under such a name. So it is checked
    before it is opened, and the checked file is the one that is opened.
    """
    if not _NAME.fullmatch(name):
        raise HandleError(f"{name!r} is not a name of shared memory")
    path = f"{FOLDER}/{name}"
    try:
        found = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise HandleError(f"{path} is gone: the rank that shared it has removed it") from None
    try:
        facts = os.fstat(found)
        if facts.st_uid != os.geteuid():
            raise PermissionError(errno.EACCES, f"it belongs to user {facts.st_uid}", path)
        if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
            raise HandleError(f"{path} is not shared memory, or has another name beside this one")
        return os.open(f"/proc/self/fd/{found}", flags | os.O_CLOEXEC)
    finally:
        os.close(found)


def path_of(fd: int) -> str:
    """Return a path by which other processes of this user open a file, until it is closed here."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def forget(name: str) -> None:
    """Remove the name; the memory lives on as long as it is mapped. May be repeated."""
    Path(FOLDER, name).unlink(missing_ok=True)


def remove_abandoned() -> None:
    """Remove the names of processes that were killed before they could `forget` them.

    The kernel ends a lock with its process, whatever PID namespace that was in. No job fails by
    this: a file that is not ours, or that the system refuses to open, lock or remove, is left
    alone.
    """
    deadline = time.monotonic() + _CLEANING_S
    with _leaving_alone(FOLDER), os.scandir(FOLDER) as entries:
        for count, entry in enumerate(entries, 1):
            if _NAME.fullmatch(entry.name):
                with _leaving_alone(entry.name), _opening:
                    if entry.stat(follow_symlinks=False).st_ino not in _locked:
                        _remove_if_abandoned(entry.name)
            if count % _NAMES_PER_LOOK == 0 and time.monotonic() >= deadline:
                log.debug("%s has too many names: the others were not looked at", FOLDER)
                return


def _remove_if_abandoned(name: str) -> None:
    fd = open_file(name, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while it is being attached to
        forget(name)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _leaving_alone(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, HandleError) as error:
        log.debug("%s was left alone: %s", what, error)


@contextlib.contextmanager
def _usable_folder(call: str) -> Iterator[None]:
    """Explain a folder that is missing, is read-only, or belongs to another user.

    `call` is the system call, which a sandbox may refuse.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _NOT_USABLE:
            raise
        raise UnsupportedError(
            f"cannot make shared memory in {FOLDER}: {_why_not_usable(call, error)}"
        ) from error


def _why_not_usable(call: str, error: OSError) -> str:
    if error.errno in _REFUSED:
        return (
            f"the system refuses {call} ({error.strerror}), which mpishare needs: allow it in the "
            "seccomp profile of the container or sandbox."
        )
    return (
        f"{error.strerror}. The ranks of a machine share host memory there, on a tmpfs in which "
        f"this user may write. Mount one with `mount -t tmpfs -o mode=1777 tmpfs {FOLDER}`; start "
        "a container with --shm-size=SIZE or --ipc=host."
    )


def _check_room(nbytes: int) -> None:
    limit, why = limits.tightest(), _why_no_room(nbytes)
    if not why and limit is not None and nbytes > limit.left:
        why = (
            f"this job or container may use {format_nbytes(limit.nbytes)} of memory on this "
            f"machine, shared memory included, and has {format_nbytes(limit.left)} left (control "
            f"group {limit.group}). Ask for more: --mem=SIZE in SLURM, --memory=SIZE for a "
            "container."
        )
    if why:
        raise _refused("reserve", nbytes, why)


def _why_no_room(nbytes: int, refusal: int = 0) -> str:
    """Return the reason of the kernel's refusal; without one, that of one which will come."""
    # First: then a larger folder would not help.
    if refusal == errno.ENOMEM or (not refusal and nbytes > available_nbytes()):
        left = format_nbytes(available_nbytes())
        return f"this machine has {left} of memory left. Ask for less, or run on more nodes."
    if refusal == errno.ENOSPC or (not refusal and nbytes > free_nbytes()):
        return f"{FOLDER} has {format_nbytes(free_nbytes())} left. {MORE_ROOM}"
    if refusal == errno.EFBIG:
        largest = format_nbytes(resource.getrlimit(resource.RLIMIT_FSIZE)[0])
        return (
            f"it is a file in {FOLDER}, and this process may make none larger than {largest}. "
            "Raise that limit with `ulimit -f unlimited`."
        )
    return ""


def room() -> tuple[int, int]:
    """Return the bytes left in the folder, and its size."""
    found = os.statvfs(FOLDER)
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


def little_room() -> str | None:
    """Return a note where the folder has so little left that the next job may not start."""
    left, total = room()
    if left >= _LITTLE_NBYTES:
        return None
    return (
        f"{FOLDER} has {format_nbytes(left)} left of {format_nbytes(total)}: a program that starts "
        f"where MPI finds no room there ends without a reason. Delete the files mpich_shm_* and "
        f"sm_segment.* of jobs that have ended. {MORE_ROOM}"
    )


def free_nbytes() -> int:
    return room()[0]


def _no_addresses() -> str:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    size = "unlimited" if limit == resource.RLIM_INFINITY else format_nbytes(limit)
    count = Path("/proc/sys/vm/max_map_count").read_text().strip()
    return (
        f"this process may map no more. What it may map is limited by `ulimit -v` ({size}), by "
        f"vm.max_map_count ({count} mappings), and by the memory of the machine where "
        "vm.overcommit_memory is 2."
    )


def available_nbytes() -> int:
    meminfo = Path("/proc/meminfo").read_text()
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    return int(match[1]) * 1024 if match else 1 << 62

"""Host memory that several processes map: a file in /dev/shm that has a name for a moment only.

Why not an MPI shared window: an array of a freed window is a segmentation fault, a window larger
than /dev/shm is made without complaint and kills the process at the first touch, and `Win.Free`
cannot be called once a rank is gone. A file that is unlinked as soon as every rank has opened it
has none of these problems: its room is reserved before the first touch, and it lives as long as any
process maps it. A process that is killed in the instant between name and unlink leaves a file
behind, which has its process identifier in its name, so that others may remove it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import itertools
import logging
import mmap
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpishare.errors import HandleError, UnsupportedError, format_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Mapped = tuple[mmap.mmap, memoryview, int]
    # `Agreement.step_keeping`, or that of other ranks, in one call.
    Steps = Callable[[Callable[[], tuple[Any, Any]]], tuple[Any, list[Any]]]

log = logging.getLogger("mpishare.window")

FOLDER = "/dev/shm"  # noqa: S108  the shared memory of a Linux machine, not a scratch folder
MORE_ROOM = (
    "In a container, start it with --shm-size=SIZE (Docker's default is 64 MiB) or --ipc=host; "
    f"else enlarge it with `mount -o remount,size=SIZE {FOLDER}`."
)
_NO_ADDRESSES = (
    "this process may map no more. See `ulimit -v`, vm.max_map_count, and vm.overcommit_memory."
)
_NOT_OF_THE_FOLDER = errno.ENOMEM, errno.ENOSPC, errno.EMFILE, errno.ENFILE
_NAME = re.compile(r"mpishare-(\d+)-(\d+)-[0-9a-f]{32}")  # process, PID namespace, random
# Names to look at: other users can make any number, while the other ranks wait for this one.
_MOST_NAMES = 10_000

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


def place() -> list[Any] | None:
    """Return the identity of this machine and container; None without a /dev/shm.

    The running kernel, and the device and the inode of the folder: a container may have been given
    a folder inside the /dev/shm of its machine. Processes with the same identity can map the same
    host memory.
    """
    kernel = Path("/proc/sys/kernel/random/boot_id")
    try:
        folder = Path(FOLDER).stat()
        return [kernel.read_text().strip(), folder.st_dev, folder.st_ino]
    except OSError:
        return None


# --- mappings, by huge pages where there are any


@functools.cache
def huge_nbytes() -> int:
    """Return the size of a huge page, 0 where the kernel has none."""
    try:
        return int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    except OSError:
        return 0


def map_file(fd: int, nbytes: int, offset: int = 0, *, is_writable: bool = True) -> Mapped:
    """Map whole pages of a file, shared; for huge pages `offset` is a multiple of their size.

    Returns the holder of the addresses, unmapped by its `close` or with the last view of it, the
    bytes of the file, and their address. A halo is cut out of rows that lie pages apart: with small
    pages each of them takes a walk through the page table, which costs more than the copy. The
    kernel maps a file's huge pages (2 MiB on x86-64) as such only where address and offset agree in
    their lower bits, which only a mapping at an address of our choice guarantees.
    """
    protection = _PROTECTION if is_writable else mmap.PROT_READ
    flags = mmap.MAP_SHARED | _MAP_FIXED
    return _map_over(
        nbytes, is_writable, lambda at: _mmap(at, nbytes, protection, flags, fd, offset)
    )


def duplicate(address: int, fd: int, nbytes: int, offset: int, *, is_writable: bool) -> Mapped:
    """Map whole pages that are mapped, shared, at an address a second time; as `map_file`."""
    del fd, offset  # the kernel takes both from the mapping
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
    return _map_over(nbytes, is_writable, lambda at: _mremap(address, 0, nbytes, flags, at))


def _map_over(nbytes: int, is_writable: bool, place: Callable[[int], Any]) -> Mapped:
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
        return held, view if is_writable else view.toreadonly(), start + skipped
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


# --- files


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
        self.address: int
        try:
            self._mapping, self.buffer, self.address = map_(fd, nbytes, offset)
        except BaseException as error:
            self.close_file()
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                raise _refused("map", nbytes, _NO_ADDRESSES) from error
            raise

    def lock(self, at: int) -> None:
        """Lock a byte of the file, or behind it, until it is closed or the process ends.

        A record lock, which a forked child does not inherit: it would outlive its parent there.
        """
        fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)

    def protect(self) -> None:
        """Let this process only read the mapping: a store that no library refuses is SIGSEGV."""
        protect(self.address, self.nbytes)

    def close_file(self) -> None:
        """Close the file; the mapping stays. May be repeated."""
        if self.fd >= 0:
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
    `UnsupportedError` if /dev/shm or the machine has not that much left, or if no file can
    be made there; no page has been touched by then.
    """
    nbytes = whole_pages(nbytes)
    with _usable_folder():
        fd = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
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
            os.posix_fallocate(fd, offset, nbytes)
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
        os.posix_fallocate(memory.fd, start, nbytes)


@contextlib.contextmanager
def _room_for(nbytes: int) -> Iterator[None]:
    """Check for room before it is taken, and explain a lack of it that the check did not see."""
    if why := _why_no_room(nbytes):
        raise _refused("reserve", nbytes, why)
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        raise _refused("reserve", nbytes, f"{error.strerror}. {MORE_ROOM}") from error


def _refused(verb: str, nbytes: int, why: str) -> UnsupportedError:
    return UnsupportedError(f"cannot {verb} {format_nbytes(nbytes)} of shared memory: {why}")


def publish(memory: SharedMemory) -> str:
    """Give memory a name under which others can `attach` it, until `forget`.

    A step of its own, so that the name is there for a moment only: a process killed while it
    reserves or fills pages leaves no file behind.
    """
    name = f"mpishare-{os.getpid()}-{_pid_namespace()}-{os.urandom(16).hex()}"
    # A folder descriptor makes Python call linkat, which follows the link in /proc.
    with _usable_folder():
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
    """Return a descriptor of the file behind a name that a rank has told. Raises as `attach`."""
    path = f"{FOLDER}/{name}"
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise HandleError(f"{path} is gone: the rank that shared it has removed it") from None


def path_of(fd: int) -> str:
    """Return a path by which other processes of this user open a file, until it is closed here."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def forget(name: str) -> None:
    """Remove the name; the memory lives on as long as it is mapped. May be repeated."""
    Path(FOLDER, name).unlink(missing_ok=True)


def map_on_all_ranks(
    step: Steps, nbytes: int, *, is_maker: bool, is_sparse: bool = False
) -> SharedMemory:
    """Map the same zeroed memory on every rank. Collective, host-blocking.

    Returns it with its file open. After an error on any rank no memory is left mapped. `is_maker`
    is True on the one rank that allocates it.
    """
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as names:

        def offer() -> tuple[SharedMemory | None, str]:
            if not is_maker:
                return None, ""
            made = undo.enter_context(contextlib.closing(create(nbytes, is_sparse=is_sparse)))
            name = publish(made)
            names.callback(forget, name)  # once all have attached it, or never will
            return made, name

        def attach_it() -> tuple[SharedMemory, None]:
            return made or undo.enter_context(contextlib.closing(_attach(published, nbytes))), None

        made, published = step(offer)
        memory: SharedMemory = step(attach_it)[0]
        undo.pop_all()
    return memory


def _attach(names: Iterable[str], nbytes: int) -> SharedMemory:
    try:
        return attach(next(filter(None, names)), nbytes)
    except PermissionError as error:
        raise UnsupportedError(
            f"cannot open the shared memory of another rank in {FOLDER}: "
            f"{error.strerror}. All ranks of a machine must run as one user; start "
            "containers with the same --user and --userns, and with --ipc=host."
        ) from error


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def remove_abandoned() -> None:
    """Remove the names of processes that were killed before they could `forget` them.

    Of this PID namespace alone. No job fails by this, and no file is opened: other users may have
    put anything there, which the system does not let this one remove.
    """
    with contextlib.suppress(OSError), os.scandir(FOLDER) as entries:
        for entry in itertools.islice(entries, _MOST_NAMES):
            found = _NAME.fullmatch(entry.name)
            if found and int(found[2]) == _pid_namespace() and _has_ended(int(found[1])):
                with contextlib.suppress(OSError):
                    Path(entry).unlink()


def _has_ended(pid: int) -> bool:
    """Whether a process has ended, with all of its threads."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX" and int(rest[16]) <= 1


@contextlib.contextmanager
def _usable_folder() -> Iterator[None]:
    """Explain a folder that is missing, is read-only, or belongs to another user."""
    try:
        yield
    except OSError as error:
        if error.errno in _NOT_OF_THE_FOLDER:
            raise
        raise UnsupportedError(
            f"cannot make shared memory in {FOLDER}: {error.strerror}. The ranks of a machine "
            "share host memory there, on a tmpfs in which this user may write. Mount one with "
            f"`mount -t tmpfs -o mode=1777 tmpfs {FOLDER}`; start a container with --shm-size=SIZE "
            "or --ipc=host."
        ) from error


def _why_no_room(nbytes: int) -> str:
    """Return why so much is not there; empty if it is."""
    # First: then a larger folder would not help.
    if nbytes > available_nbytes():
        left = format_nbytes(available_nbytes())
        return f"this machine has {left} of memory left. Ask for less, or run on more nodes."
    if nbytes > free_nbytes():
        return f"{FOLDER} has {format_nbytes(free_nbytes())} left. {MORE_ROOM}"
    return ""


def free_nbytes() -> int:
    """Return the bytes left in the folder."""
    found = os.statvfs(FOLDER)
    return found.f_bavail * found.f_frsize


def available_nbytes() -> int:
    meminfo = Path("/proc/meminfo").read_text()
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    return int(match[1]) * 1024 if match else 1 << 62

"""Host memory that is shared already, by other libraries and by files, shared where it is."""

import contextlib
import ctypes
import mmap
import os
import tempfile
from functools import partial
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from mpishare import UnsupportedError
from mpishare.memory import mapped
from tests.helpers.rings import beside
from tests.helpers.windows import fails_on, nothing_leaked

TWO = pytest.mark.ranks(min=2)
N = 5000  # float64 elements, of several pages
SYSTEM_V = 0o1600  # IPC_CREAT, and read and write for this user


def by_shared_memory(stack, node):
    block = shared_memory.SharedMemory(create=True, size=8 * N)
    resource_tracker.unregister(f"/{block.name}", "shared_memory")  # no warning from the tracker
    stack.append(block.close)
    stack.append(Path("/dev/shm", block.name).unlink)
    return np.ndarray(N, "f8", block.buf)


def by_unlinked_shared_memory(stack, node):
    array = by_shared_memory(stack, node)
    stack.pop()()
    return array


def by_memmap(stack, node):
    with tempfile.NamedTemporaryFile(delete=False) as file:
        stack.append(Path(file.name).unlink)
        return np.memmap(file, "f8", "w+", shape=N, offset=24)


def by_memfd(stack, node):
    fd = os.memfd_create("mine")
    os.ftruncate(fd, 8 * N)
    mapping = mmap.mmap(fd, 8 * N)
    os.close(fd)
    return np.frombuffer(mapping)


def by_mpi(stack, node):
    if node.size == 1:
        pytest.skip("MPICH allocates private memory for one rank")
    window = MPI.Win.Allocate_shared(8 * N, 8, comm=node.comm)
    stack.append(window.Free)
    return np.frombuffer(window.tomemory())


def by_system_v(stack, node):
    """Of one segment, attached by all ranks; each shares its own part."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    size = 8 * N * node.size
    number = node.comm.bcast(libc.shmget(0, size, SYSTEM_V) if node.is_leader else None)
    address = libc.shmat(number, None, 0)
    node.comm.Barrier()
    libc.shmctl(number, 0, None)  # goes with the last process
    whole = np.frombuffer((ctypes.c_char * size).from_address(address))
    return whole[N * node.rank : N * (node.rank + 1)]


def by_split_mapping(stack, node):
    """Its pages are several mappings of one file, since one of them has other rights."""
    array = by_memfd(stack, node)
    libc = ctypes.CDLL(None)
    page = array.ctypes.data + mmap.PAGESIZE
    assert not libc.mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, 7)
    return array


def by_torch(stack, node):
    torch = pytest.importorskip("torch")
    return torch.zeros(N, dtype=torch.float64).share_memory_()


WAYS = [
    by_shared_memory,
    by_unlinked_shared_memory,
    by_memmap,
    by_memfd,
    by_mpi,
    by_system_v,
    by_split_mapping,
    by_torch,
]


@pytest.fixture
def made():
    """Functions that are called after the test."""
    stack = []
    yield stack
    for undo in reversed(stack):
        with contextlib.suppress(BufferError):  # arrays on it are alive
            undo()


@pytest.mark.both_mpis
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_it_is_the_same_memory_on_all_ranks(host_node, made, way):
    node = host_node
    source = way(made, node)
    array = np.asarray(source)
    array[...] = node.rank
    node.share_each(source, copy=False).close()  # the first one opens the door of each rank
    with nothing_leaked(node):
        win = node.share_each(source, copy=False)
        assert win.array.ctypes.data == array.ctypes.data
        win.fence()
        left, right = beside(node)
        theirs = win.segment(right)
        assert (theirs[0], theirs[-1]) == (right, right)
        win.fence()
        theirs[...] = 10 + node.rank
        win.fence()
        assert (array == 10 + left).all()
        del theirs
        win.close()


@TWO
def test_read_only_memory_is_read_only_on_all_ranks(host_node, made):
    node = host_node
    frozen, mapped_so = by_shared_memory(made, node), by_memmap(made, node)
    frozen.flags.writeable = False
    for source in (np.memmap(mapped_so.filename, "f8", "r", shape=N), frozen):
        with node.share_each(source, copy=False) as win:
            for rank in range(node.size):
                with pytest.raises(ValueError, match="read-only"):
                    win.segment(rank)[0] = 1
                assert not win.segment(rank).any()
            win.fence()


@TWO
def test_a_file_without_a_name_that_others_have_not_mapped(host_node, caplog):
    node = host_node
    source = np.frombuffer(mmap.mmap(-1, 4096), "f8")
    with nothing_leaked(node):
        words = "/dev/zero (deleted): the file has no name any more"
        refused = partial(node.share_each, source, copy=False)
        fails_on(node.comm, range(node.size), UnsupportedError, refused, words)
    win = node.share_each(source, copy=None)
    assert "has no name any more" in caplog.text
    assert win.array.ctypes.data != source.ctypes.data


def test_a_file_that_is_too_short_is_refused(host_node, made):
    """Its mapping has a page that is no part of the file: to touch it ends the process."""
    fd = os.memfd_create("short")
    os.ftruncate(fd, 3 * mmap.PAGESIZE)
    mapping = mmap.mmap(fd, 3 * mmap.PAGESIZE)
    os.ftruncate(fd, mmap.PAGESIZE)
    array = np.frombuffer(mapping)
    address, nbytes = array.ctypes.data, array.nbytes
    part = mapped.find(address, nbytes, is_writable=True)
    assert mapped.open_again(part, nbytes, is_writable=True) is None
    with pytest.raises(UnsupportedError, match="truncated to 4096 bytes"):
        mapped.map_part(fd, part, nbytes, is_writable=True)


def test_another_file_of_the_same_name_is_not_taken(host_node, tmp_path):
    """The first is deleted and closed, and a file of its name lies there, and a FIFO."""
    path = tmp_path / "data"
    array = np.memmap(path, "f8", "w+", shape=8)
    part = mapped.find(array.ctypes.data, array.nbytes, is_writable=True)
    is_other = mapped.FilePart(part.file.replace(" ", " 9", 1), part.offset)
    assert mapped.open_again(is_other, array.nbytes, is_writable=True) is None
    path.unlink()
    os.mkfifo(path)
    fd = mapped.open_again(part, array.nbytes, is_writable=True)  # its name is another one now
    assert fd is None

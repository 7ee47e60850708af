"""Kinds of memory of other libraries, and how each travels to the other ranks."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import NamedTuple

COPY = "or pass copy=True"
_POSIX_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class Kind(StrEnum):
    """The kind of memory of a `Handle`, which decides how its receiver maps it."""

    # A whole allocation of mpishare.
    ALLOCATION = "allocation"
    # Memory of an open window, which every rank has mapped already.
    WINDOW = "window"
    # A part of a block of ``cuMemAlloc``: the block's legacy IPC handle.
    BLOCK = "block"
    # A part of an allocation of a memory pool: the pool's descriptor, and 64 bytes.
    POOL = "pool"
    # Chunks of physical memory mapped one after the other: a descriptor for each.
    CHUNKS = "chunks"
    # A part of a file, which every rank maps by a descriptor or out of its own mapping.
    FILE = "file"


class MemoryType(IntEnum):
    """``CUmemorytype``: the driver's name for the place of memory."""

    UNKNOWN = 0
    HOST = 1
    DEVICE = 2


class PointerAttributes(NamedTuple):
    """Attributes of an address from the CUDA driver (``cuPointerGetAttribute``)."""

    memory_type: int  # a `MemoryType`
    ordinal: int
    is_managed: bool
    has_legacy_handle: bool
    handle_types: int  # bits of the kinds of handles for which it was made
    pool: int  # 0 for none
    start: int  # of the allocation around the address, like `nbytes`
    nbytes: int
    buffer_id: int  # unique in the process: another allocation at this address has another one


class Refusal(NamedTuple):
    """The reason why memory cannot be shared in place, and the remedy."""

    why: str
    remedy: str


FREED = Refusal("CUDA has no memory at its address: it was freed", "Share an array that is alive")
HOST_ON_CUDA = Refusal(
    "it is in host memory, and windows of this node are in GPU memory",
    f"Move it to the GPU with cupy.asarray, {COPY}",
)
MAPPED = Refusal(
    "it is another rank's memory, mapped here, and in no open window",
    f"Let the rank that owns it share it, {COPY}",
)
PRIVATE = Refusal(
    "it is private memory of this process, which no other process can map",
    f"Allocate it with node.allocate_each and write into window.array, {COPY}",
)
UNNAMED = Refusal(
    "the file has no name any more, and the rank that shares it no descriptor of it: only ranks "
    "that have mapped it too can share it in place",
    "Share memory that keeps its file, as multiprocessing.shared_memory and numpy.memmap do, "
    f"{COPY}",
)
OF_WINDOW = Refusal(
    "it is in a window of another node, or in one that is closed",
    f"Share it on the node of the window while that is open, {COPY}",
)
POOLED = Refusal(
    "it is in a pool, whose arrays travel one by one",
    f"Send pool.handle(array) to the others, which open it by pool.open, {COPY}",
)


def classify(found: PointerAttributes, ordinal: int) -> Kind | Refusal:
    """Return how GPU memory travels from a rank that uses GPU `ordinal`, or why it does not."""
    if found.memory_type == MemoryType.UNKNOWN:
        return FREED
    if found.is_managed:
        return Refusal(
            "it is managed memory (cudaMallocManaged), which belongs to one process",
            f"Use plain device memory, as CuPy's default pool gives, {COPY}",
        )
    if found.memory_type == MemoryType.HOST:
        return Refusal(
            "it is pinned host memory, for which CUDA has no handle",
            f"Move it to the GPU with cupy.array(x, copy=True), {COPY}",
        )
    if found.ordinal != ordinal:
        return Refusal(
            f"it is on GPU {found.ordinal}, and the node of this rank uses GPU {ordinal}",
            f"Make it there, or Node(device={found.ordinal}), {COPY}",
        )
    if found.has_legacy_handle:
        return Kind.BLOCK
    if found.handle_types & _POSIX_FD:
        return Kind.POOL if found.pool else Kind.CHUNKS
    if found.pool:
        return Refusal(
            "it is from a memory pool without handles (cudaMallocAsync, cupy.cuda.malloc_async)",
            "Use a pool made for POSIX file descriptors, CuPy's or PyTorch's default allocator, "
            f"{COPY}",
        )
    return Refusal(
        "it was mapped without a handle for other processes, or is another process's memory",
        f"Let the process that owns it share it, {COPY}",
    )

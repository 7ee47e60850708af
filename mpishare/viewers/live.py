"""The live memory of a window, mapped by a process outside the job."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.errors import UnsupportedError
from mpishare.viewers.readers import Segment, map_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.backends.cuda import CudaBackend
    from mpishare.backends.cuda_memory import CudaMemory


def map_files(
    segments: Sequence[Segment], dtype: np.dtype[Any], fds: Sequence[int], *, is_writable: bool
) -> dict[int, Any]:
    """Return each rank's segment as an array on its file. Local."""
    arrays = {}
    for segment, fd in zip(segments, fds, strict=True):
        again = fd
        if is_writable:
            # What came may be read alone; a process of the same user may open it once more.
            again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            mapping = map_part(again, segment.nbytes, 0, is_writable=is_writable)
        finally:
            if again != fd:
                os.close(again)
        whole = np.frombuffer(mapping, dtype=np.uint8)
        arrays[segment.rank] = np.ndarray(segment.shape, dtype, whole, strides=segment.strides)
    return arrays


def map_on_gpu(
    backend: CudaBackend, segments: Sequence[Segment], tokens: Sequence[str]
) -> list[CudaMemory]:
    """Return each segment's memory, mapped on this process's GPU. Local.

    Raises
    ------
    CudaError
        If one of them cannot be mapped; then none is.
    """
    memories: list[CudaMemory] = []
    try:
        for segment in segments:
            token = tokens[segment.rank]
            memories.append(backend.open(token, max(segment.nbytes, 1), segment.uuid))
    except BaseException:
        for memory in memories:
            memory.close()
        raise
    return memories


def open_gpu(uuids: Sequence[str]) -> CudaBackend:
    """Return the backend of this process on the first of these GPUs, which becomes current. Local.

    Raises
    ------
    UnsupportedError
        If this process does not see all of them, or has not the packages to use them.
    """
    if why := _why_no_gpu():
        raise UnsupportedError(why)
    try:
        from mpishare.backends.cuda import CudaBackend
        from mpishare.backends.driver import visible_uuids
    except ImportError as error:
        raise UnsupportedError(f"CuPy or cuda-bindings cannot be loaded: {error}") from None
    names = visible_uuids()
    hidden = sorted({uuid for uuid in uuids if uuid not in names})
    if hidden:
        raise UnsupportedError(f"{', '.join(uuid[:12] for uuid in hidden)} is not visible")
    return CudaBackend(names.index(uuids[0]), f"process {os.getpid()}")


@functools.cache  # where no GPU is visible, the driver takes 60 ms to say so
def _why_no_gpu() -> str:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no NVIDIA driver"
    return "no GPU is visible" if library.cuInit(0) else ""

"""The live memory of a window, mapped by a process outside the job."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mpishare.backends.presence import why_no_gpu
from mpishare.errors import CudaError, UnsupportedError
from mpishare.memory.memory import host_anchor, host_array
from mpishare.view.readers import map_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.backends.cuda import CudaBackend
    from mpishare.backends.cuda_memory import CudaMemory
    from mpishare.view.description import Segment


def map_files(
    segments: Sequence[Segment], fds: Sequence[int], *, is_writable: bool
) -> dict[int, Any]:
    """Return each rank's segment as an array on its file."""
    arrays = {}
    for segment, fd in zip(segments, fds, strict=True):
        again = fd
        if is_writable:
            # The descriptor may be read-only; a process of the same user may open the file once
            # more.
            again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            mapping = map_part(again, segment.layout.nbytes, 0, is_writable=is_writable)
        finally:
            if again != fd:
                os.close(again)
        arrays[segment.rank] = host_array(host_anchor(mapping), segment.layout)
    return arrays


def map_on_gpu(
    backend: CudaBackend, segments: Sequence[Segment]
) -> tuple[dict[int, CudaMemory], dict[int, str]]:
    """Map each rank's segment on this process's GPU, where the driver allows it.

    Returns the memories and the refusals, by rank. It is tried even if this process does not see
    that rank's GPU: where ``CUDA_VISIBLE_DEVICES`` alone hides it, its memory can be mapped; where
    a control group hides it, it cannot.
    """
    memories: dict[int, CudaMemory] = {}
    refusals: dict[int, str] = {}
    try:
        for segment in segments:
            nbytes = max(segment.layout.nbytes, 1)
            try:
                memory = backend.open(segment.token, nbytes, segment.uuid)
            except CudaError as error:
                refusals[segment.rank] = str(error).rstrip(".")
            else:
                memories[segment.rank] = memory
    except BaseException:
        for memory in memories.values():
            memory.close()
        raise
    return memories, refusals


def open_gpu(uuids: Sequence[str]) -> tuple[CudaBackend, set[str]]:
    """Return this process's backend on the first of these GPUs that it sees, else on any.

    Its GPU becomes the current one. Also returns the GPUs that this process does not see. Raises
    `UnsupportedError` if it sees none, or lacks the packages to use one.
    """
    if why := why_no_gpu():
        raise UnsupportedError(why)
    try:
        from mpishare.backends.cuda import CudaBackend
        from mpishare.backends.driver import visible_uuids
    except ImportError as error:
        raise UnsupportedError(f"CuPy or cuda-bindings cannot be loaded: {error}") from None
    visible = visible_uuids()
    ordinal = next((visible.index(uuid) for uuid in uuids if uuid in visible), 0)
    return CudaBackend(ordinal, f"process {os.getpid()}"), {*uuids} - {*visible}

"""The kernels of halo exchanges, and their launches."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from mpishare.backends import driver
from mpishare.errors import UnsupportedError
from mpishare.halo.cuda.work_items import SIZE_OPTIONS, WorkList

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.halo.cuda.direction import Direction
    from mpishare.halo.cuda.work_items import ItemArray

THREADS = 512
_BLOCKS_PER_SM = 2  # enough to fill the links, with room for other work
_DEPTH_OF_SHARED_GPU = 4
_MAX_FIELDS = 448  # 3.5 KiB of the 4 KiB of a launch's parameters
_SM_COUNT = 16  # cudaDevAttrMultiProcessorCount
_FILES = {"fused": "fused.cu", "streamed": "streamed.cu", "add": "streamed.cu"}


@functools.cache
def kernel(name: str, nfields: int, depth: int, device: int) -> int:
    """Return the driver's handle of a kernel, loaded on the current device. Local.

    Parameters
    ----------
    name : str
        ``fused``, ``streamed`` or ``add``.
    nfields : int
        Fields of the plan.
    depth : int
        Units that a thread has in flight.
    device : int
        The current device, since a handle belongs to one.
    """
    if nfields > _MAX_FIELDS:
        raise UnsupportedError(f"{nfields} fields in one plan: {_MAX_FIELDS} are allowed on CUDA")
    del device
    return int(_module(_FILES[name], nfields, depth).get_function(name).kernel.ptr)


@functools.cache
def _module(file: str, nfields: int, depth: int) -> cupy.RawModule:
    options = f"-DNFIELDS={nfields}", f"-DDEPTH={depth}", *SIZE_OPTIONS
    return cupy.RawModule(code=source(file), options=options)


def source(file: str) -> str:
    """Return a CUDA source with its header inserted, since the compiler sees no folder."""
    folder, header = Path(__file__).parent, "work_items.cuh"
    text = (folder / file).read_text()
    return text.replace(f'#include "{header}"', (folder / header).read_text())


class Launcher:
    """Prepares launches for one direction of a plan, and holds the memory they read. Local.

    Parameters
    ----------
    direction : Direction
        What is sent and received.
    backend : CudaBackend
        The backend of this rank.
    where : str
        Names the plan and the rank in errors.

    Attributes
    ----------
    pointers : ctypes array
        The addresses of the fields: the first argument of every launch.
    """

    def __init__(self, direction: Direction, backend: Any, where: str) -> None:
        self.where = where
        self.pointers = (ctypes.c_uint64 * len(direction.layouts))()
        self._layouts = direction.layouts
        self._device = backend.device.ordinal
        ranks = direction.ranks_per_gpu
        self._depth = _DEPTH_OF_SHARED_GPU if ranks > 1 else 1
        self._held: list[Any] = []
        self._states: dict[str, int] = {}
        self._ranks_per_gpu, self._has_mps = ranks, backend.device.mps

    @functools.cached_property
    def max_blocks(self) -> int:
        """Blocks of a launch, so that the launches of all ranks on a GPU fit there at once."""
        sm_count = int(cupy.cuda.runtime.deviceGetAttribute(_SM_COUNT, self._device))
        if self._ranks_per_gpu == 1 or not self._has_mps:
            # The GPU is this rank's alone, always or for a time slice.
            return _BLOCKS_PER_SM * sm_count
        # Under MPS the waiting ranks together must leave room for the one they wait for. With half
        # a block per SM each (half of what fits) four ranks were seen to wait for a kernel that was
        # not scheduled.
        return max(1, sm_count // self._ranks_per_gpu)

    def upload(self, array: np.ndarray[Any, Any]) -> int:
        """Copy an array to the GPU and return its address there; held until `close`."""
        copied = cupy.asarray(np.ascontiguousarray(array).view(np.uint8).reshape(-1))
        self._held.append(copied)
        return int(copied.data.ptr)

    def state(self, name: str) -> int:
        """Return the address of 16 zeroed bytes that a kernel keeps from launch to launch."""
        if name not in self._states:
            self._states[name] = self.upload(np.zeros(2, np.uint64))
        return self._states[name]

    def work_list(self, alignments: Sequence[int]) -> WorkList:
        """Return an empty list of work items, for fields of these alignments."""
        return WorkList(self._layouts, alignments, self.upload)

    def prepare(
        self, name: str, items: ItemArray, *rest: int, blocks: int = 0, threads: int = THREADS
    ) -> driver.Launch:
        """Return a launch of a kernel on work items; `rest` are its further pointers."""
        arguments = [
            self.pointers,
            ctypes.c_uint64(items.address),
            ctypes.c_uint32(items.length),
            *map(ctypes.c_uint64, rest),
        ]
        grid = max(1, min(items.length, blocks or self.max_blocks))
        function = kernel(name, len(self._layouts), self._depth, self._device)
        return driver.Launch(function, grid, threads, arguments, self.where)

    def warm_up(self, direction: Direction) -> None:
        """Launch each kernel once on no items: a kernel loaded later would wait for the streams."""
        nothing = self.work_list(()).load()
        state = self.state("warm-up")
        if direction.has_fused:
            self.prepare("fused", nothing, state, nothing.address).enqueue(0)
        if direction.is_streamed:
            self.prepare("streamed", nothing, state, 0).enqueue(0)
        if direction.is_reverse:
            self.prepare("add", nothing).enqueue(0)

    def close(self) -> None:
        """Free what the launches read, once none is under way."""
        self._held = []

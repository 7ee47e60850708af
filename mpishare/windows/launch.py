"""Launches of kernels that wait for other ranks: refused where they would hang, then in order."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.coordination import recording
from mpishare.errors import UnsupportedError, counted
from mpishare.runtime.launch_order import ranks_per_gpu, waiting_blocks
from mpishare.windows.window_device import RECORD, WindowDevice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.backends import StreamInfo
    from mpishare.runtime.context import NodeContext

_CALL = "Node.launch"
_MOST = 64  # launches of one window that are known to fit: kernels, with their sizes


def launch_kernel(
    context: NodeContext,
    kernel: Any,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: Sequence[Any],
    stream: Any,
    shared_mem: int,
    time_sliced_gpus: Sequence[str],
) -> None:
    """Enqueue a kernel; see `Node.launch`. `time_sliced_gpus`: shared by ranks without MPS."""
    context.agreement.check()
    backend: Any = context.backend
    if not backend.has_streams:
        raise UnsupportedError(
            f"{_CALL} failed: the host backend has no kernels, which are on GPUs alone. Order "
            "accesses here by window.fence(), or by post, start, complete and wait"
        )
    devices = _devices_of(context, args)
    for each in devices:
        each._check_kernels()
    context.agreement.check()
    if time_sliced_gpus:
        raise UnsupportedError(
            f"{_CALL} failed: ranks share {time_sliced_gpus[0][:12]} without the Multi-Process "
            "Service: while one waits in a kernel, the other does not run. Start by "
            "`python -m mpishare.mps mpirun ...`, or give each rank a GPU of its own"
        )
    fits, launch = devices[0].fits, (kernel, prod(grid), prod(block), shared_mem)
    if launch not in fits:
        _require_residency(context, *launch)
        if len(fits) >= _MOST:
            fits.clear()
        fits.add(launch)
    entered = backend.enter(stream)
    handle, owner, stays_alive, is_captured = entered
    _follow(devices, entered)
    order = devices[0].order  # that of the GPU
    order.begin(entered)
    if backend.xp.cuda.get_current_stream().ptr == handle:
        kernel(grid, block, tuple(args), shared_mem=shared_mem)
    else:
        from mpishare.backends.cuda_streams import borrowed, on_stream

        is_cupys = isinstance(owner, backend.xp.cuda.Stream)
        with on_stream(owner if is_cupys else borrowed(handle, backend.device.ordinal)):
            kernel(grid, block, tuple(args), shared_mem=shared_mem)
    order.end(entered)
    for each in devices:
        each.calls[0] += 1
        if not (stays_alive or is_captured):
            each.chain.leave()


def _devices_of(context: NodeContext, args: Sequence[Any]) -> list[WindowDevice]:
    """Return the devices among a kernel's arguments; `ValueError` where there is none."""
    hosts = {
        int(each["host"]) for each in args if isinstance(each, np.ndarray) and each.dtype == RECORD
    }
    found = [device for host in hosts if (device := WindowDevice.of_address.get(host)) is not None]
    if not found or len(found) < len(hosts) or any(each._context is not context for each in found):
        raise ValueError(
            f"{_CALL} failed: the kernel's arguments have no window.device, or one of a window "
            "that is closed or of another node. A kernel that waits for no rank is launched by "
            "CuPy alone"
        )
    return found


def _follow(devices: Sequence[WindowDevice], entered: StreamInfo) -> None:
    """Let a launch follow the last one of each device, or record it if it is captured."""
    handle, owner, stays_alive, is_captured = entered
    if not is_captured:
        recording.require_none(_CALL, "its stream is not the captured one")
        for each in devices:
            each.chain.follow(handle, owner, stays_alive=stays_alive)
    elif (captured_by := recording.current()) is not None:
        for each in devices:
            captured_by.add(each)


def _require_residency(
    context: NodeContext, kernel: Any, nblocks: int, nthreads: int, shared_mem: int
) -> None:
    """Raise `UnsupportedError` if not all blocks run at once, with those of the GPU's other ranks.

    A block that is not resident starts only when another ends, which may wait for it.
    """
    import cupy

    function = getattr(kernel, "kernel", kernel).ptr
    per_sm = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(
        function, nthreads, shared_mem
    )
    most, nranks = waiting_blocks(context, per_sm), ranks_per_gpu(context)
    if nblocks > most:
        shared = "" if nranks == 1 else f", which {counted(nranks, 'rank')} share,"
        raise UnsupportedError(
            f"{_CALL} failed: of {counted(nblocks, 'block')} of {counted(nthreads, 'thread')} only "
            f"{most} run at once on this GPU{shared} and a block that does not run may be the one "
            "that others wait for. Launch fewer blocks, and let each do more"
        )

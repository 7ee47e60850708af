"""A window as kernels see it: its record and signals; launches of kernels that wait for ranks."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np

from mpishare.coordination import recording
from mpishare.coordination.counters import RELEASED, whole_slots
from mpishare.coordination.life import Event
from mpishare.errors import UnsupportedError, counted, overwritten
from mpishare.runtime.context import NodeObject
from mpishare.runtime.launch_order import LaunchOrder, ranks_per_gpu, waiting_blocks
from mpishare.runtime.stream_chain import StreamChain
from mpishare.windows.allocate import Source, make_window
from mpishare.windows.arguments import check_layout
from mpishare.windows.epochs import epoch_counters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.backends import StreamInfo
    from mpishare.coordination.agreement import Agreement
    from mpishare.runtime.context import NodeContext
    from mpishare.windows.window import Window

RECORD = np.dtype(
    [
        ("peers", "<u8"),
        ("signals", "<u8"),
        ("local", "<u8"),
        ("host", "<u8"),
        ("self", "<u8"),
        ("deadline", "<u8"),
        ("rank", "<i4"),
        ("size", "<i4"),
        ("slots", "<i4"),
        ("stride", "<i4"),
    ]
)
"""`mpishare::Device` in mpishare.cuh."""

_LOCAL_ROWS = 4  # barriers, blocks, epochs, lost
_LATE, _OVERWRITTEN = 1, 2  # why a wait failed, in mpishare.cuh
_CALL = "Node.launch"
_MOST = 64  # launches of one window that are known to fit: kernels, with their sizes


class WindowDevice(NodeObject):
    """The signals of a window, for kernels. Collective to make, host-blocking.

    The words of a rank lie in its own GPU memory: for each writer a row of `slots`, then the rows
    that only the rank itself uses, then what the record points to. What the host must see during a
    kernel lies in the counters of the words' window, whose fences nobody calls.
    """

    # The open ones of this process, by the field ``host`` of their records.
    of_address: ClassVar[WeakValueDictionary[int, WindowDevice]] = WeakValueDictionary()
    _closes_first = True  # its kernels use the window
    _has_kernels = True
    events = ()  # see `Replayable`

    def __init__(self, context: NodeContext, window: Window, slots: int) -> None:
        call, size, rank = "Node.allocate_each", context.size, context.rank
        self.name = window.name
        self._context = context
        backend: Any = context.backend
        stride = whole_slots(slots)
        local = size * stride
        tables = local + _LOCAL_ROWS * stride
        nwords = tables + 2 * size + RECORD.itemsize // 8
        layout = check_layout(context, call, nwords, "u8")
        segments, zeros = dict.fromkeys(range(size), layout), Source(layout, 0)
        self._words = words = make_window(context, call, segments, None, zeros, is_part=True)
        words.name = f"signals of {window.name}"
        self._row = epoch_counters(size) // size
        self.abort = words._counters.address + 8 * self._row * rank
        mine = words.segment(rank).data.ptr
        peers, signals, here = (mine + 8 * at for at in (tables, tables + size, tables + 2 * size))
        deadline = min(int(1e9 * context.agreement.timeout_s), (1 << 63) - 1)
        host = self.abort, here, deadline
        self.record = np.array(
            (peers, signals, mine + 8 * local, *host, rank, size, slots, stride), RECORD
        )
        self.record.flags.writeable = False
        of = [window, words]
        addresses = [each.segment(peer).data.ptr for each in of for peer in range(size)]
        rows = np.array(addresses, "u8"), self.record.reshape(1).view("u8")
        words.array[tables:].set(np.concatenate(rows))
        # All streams: a kernel of another window that is under way would not be in the order below.
        context.drain(call)
        self.chain = StreamChain(backend, self.name)
        self.order = LaunchOrder.join(backend)
        # One word, as of any engine whose calls a graph may repeat.
        self.calls = memoryview(bytearray(8)).cast("Q")
        # The kernels, with their sizes, whose blocks run at once: asked once for each.
        self.fits: set[tuple[Any, ...]] = set()
        self.of_address[self.abort] = self
        context.register(self, is_part=True)

    @property
    def agreement(self) -> Agreement:
        """That of the node."""
        agreement: Agreement = self._context.agreement
        return agreement

    @property
    def chains(self) -> Sequence[StreamChain]:
        """The order of its launches, and that of all kernels of this GPU that wait."""
        return [self.chain, self.order.chain]

    def _is_over(self) -> bool:
        return self.chain.is_over()

    def close(self) -> None:
        """Free the signals. Collective, host-blocking; the window closes it."""
        if self._is_closed:
            return
        self._context.begin_close(f"{self.name}: close")
        self._is_closed = True
        # It has forgotten a window that was dropped in a cycle.
        self.of_address.pop(self.abort, None)
        self._context.unregister(self)
        self.chain.end()
        self.order.leave()
        self._words.close()

    def _abandon(self) -> None:
        self._is_closed = True
        self._context.unregister(self)

    def _pending(self) -> list[int]:
        return self._marked(1, 1)

    def _check_kernels(self) -> None:
        start = 1 + self._context.size
        if not any(self._words_from(start)):  # before every launch
            return
        here, call = self.agreement, f"{self.name}: a wait in a kernel"
        if ranks := self._marked(start, _OVERWRITTEN):
            here.life.end(Event.DEADLINE, overwritten(call, ranks, here.here))
        elif ranks := self._marked(start, _LATE):
            here.fail_late(call, ranks)

    def _marked(self, start: int, mark: int) -> list[int]:
        """Return the ranks whose words from `start` on are the mark."""
        # A failure of the node, told by itself, has raised all of them.
        return [r for r, word in enumerate(self._words_from(start)) if word % RELEASED == mark]

    def _words_from(self, start: int) -> memoryview:
        """Return a word for each rank of this rank's row, from `start` on."""
        begin = self._row * self._context.rank + start
        return self._words._view[begin : begin + self._context.size]


# --- launches, refused where they would hang, then in order


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
            "Service: while one waits in a kernel, the other does not run. Start "
            "`nvidia-cuda-mps-control -d` before the job, or give each rank a GPU of its own"
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

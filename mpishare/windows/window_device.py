"""A window as kernels see it: its record and signals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np

from mpishare.coordination.counters import NO_WORDS, RELEASED, whole_slots
from mpishare.coordination.life import Event
from mpishare.errors import overwritten
from mpishare.runtime.context import NodeObject
from mpishare.runtime.launch_order import LaunchOrder
from mpishare.runtime.stream_chain import StreamChain
from mpishare.windows.allocate import Source, make_window
from mpishare.windows.arguments import check_layout
from mpishare.windows.epochs import epoch_counters

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    nccl = None  # see `Replayable`

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
        self._is_closed, self.calls = True, NO_WORDS
        # It has forgotten a window that was dropped in a cycle.
        self.of_address.pop(self.abort, None)
        self._context.unregister(self)
        self.chain.end()
        self.order.leave()
        self._words.close()

    def _abandon(self) -> None:
        self._is_closed, self.calls = True, NO_WORDS
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

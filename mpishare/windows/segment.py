"""The segments of a window: each was allocated or given by one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.errors import ClosedError
from mpishare.memory.kinds import Kind
from mpishare.memory.memory import Memory, host_anchor, host_array

if TYPE_CHECKING:
    from mpishare.memory.handle import Handle
    from mpishare.memory.memory import ArrayLayout
    from mpishare.runtime.context import NodeContext


class WindowPart(Memory):
    """A part of a segment that this rank has mapped already, and that it keeps mapped."""

    def __init__(self, whole: Memory, offset: int, nbytes: int) -> None:
        super().__init__(whole.address + offset, nbytes)
        self._whole, self._offset = whole, offset
        self._keeper = whole.array((whole.nbytes,), "u1")

    def _hold(self) -> Any:
        return self._new_anchor()  # it holds the memory also where no array of this part does

    def _new_anchor(self) -> Any:
        if self._keeper is None:
            raise ValueError("the memory is closed")
        return self._keeper

    def _array(self, anchor: Any, layout: ArrayLayout) -> Any:
        if self.is_readonly and isinstance(anchor, np.ndarray):
            offset = self._offset + layout.offset
            shown = host_anchor(memoryview(anchor.data).toreadonly())
            return host_array(shown, layout._replace(offset=offset))
        del anchor  # holds the segment's, on which this array is made
        return self._whole.view(layout._replace(offset=self._offset + layout.offset))

    def _release(self) -> None:
        self._keeper = None


def open_memory(context: NodeContext, handle: Handle, rank: int) -> Memory:
    """Map memory of another rank, as its kind demands."""
    if handle.kind == Kind.ALLOCATION:
        return context.backend.open(handle.token, handle.capacity, handle.uuid)
    if handle.kind == Kind.WINDOW:
        window, segment = map(int, handle.token.split(":"))
        whole = context.segment_memory(window, segment)
        if whole is None:
            raise ClosedError(f"window {window}, which holds the array of rank {rank}, is closed")
        return WindowPart(whole, handle.offset, handle.nbytes)
    return context.in_place.open(handle, rank)

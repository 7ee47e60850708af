"""The arrays of a redistribution: checked, made where none are given, copied where they have gaps.

What the engines move has the layout that the plan was made for, C-contiguous. Arrays with other
strides go through a copy on the stream of the call, which no other rank needs to know of.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mpishare.memory.memory import address_of
from mpishare.plans.disjoint import require_distinct_cells
from mpishare.plans.layout import (
    FieldLayout,
    array_of,
    as_numpy,
    is_tensor,
    require_writeable,
)


class Side(NamedTuple):
    """The part of this rank, spread one way.

    `axes` are those of the part in the order of its memory, by their place in the global array, and
    `cells` the way back, for `transpose`; None where nothing is permuted.
    """

    name: str  # "source" or "target"
    shape: tuple[int, ...]  # as users see it
    given: FieldLayout  # of such an array
    layout: FieldLayout  # with the axes of the global array
    cells: tuple[int, ...] | None

    def as_cells(self, array: Any) -> Any:
        """Return a view with the axes of the global array."""
        if self.cells is None:
            return array
        permute = getattr(array, "permute", None) or array.transpose  # that of PyTorch, or NumPy's
        return permute(self.cells)


class Arrays:
    """Makes and checks arrays in the memory of a plan: of NumPy, or of CuPy and PyTorch."""

    def __init__(self, *, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.own: Any = np.ndarray
        if on_gpu:
            import cupy

            self.own = cupy.ndarray

    def new(self, like: Any, side: Side, stream: Any) -> Any:
        """Return a new array of a side, of the library of another one."""
        if stream is None and type(like) is self.own:  # most calls: no stream is made current
            return self.own(side.shape, side.layout.dtype)
        with self.on(like, stream):
            if is_tensor(like):
                torch = sys.modules["torch"]
                return torch.empty(side.shape, dtype=like.dtype, device=like.device)
            return self.own(side.shape, side.layout.dtype)

    def checked(self, given: Any, name: str, side: Side, *, is_written: bool = False) -> Any:
        """Return an array, as NumPy's in host memory; raise unless it is one of the side."""
        if given is None:
            raise TypeError(
                f"{name} is None: give this rank's part of the {side.name}, of shape {side.shape} "
                f"and dtype {side.layout.dtype}"
            )
        array = self.seen(array_of(given), name)
        found = self._span_of(array, name)[1]
        if is_written:
            require_distinct_cells(found, name)
            if not self.on_gpu:
                require_writeable(array, name)
        wanted = FieldLayout(side.shape, found.strides, side.layout.dtype, side.layout.device)
        if found.kind != wanted.kind:
            raise ValueError(
                f"{name} is not this rank's part of the {side.name}: {wanted.difference(found)}. "
                f"Give one of shape {side.shape} and {side.layout.dtype}, or make another plan"
            )
        return array

    def seen(self, array: Any, name: str) -> Any:
        """Return an array as the engines know it: in host memory NumPy's, converted once a call."""
        return array if self.on_gpu else as_numpy(array, name)

    def _place_of(self, array: Any, name: str) -> tuple[int, FieldLayout]:
        """Return the address and the layout of an array."""
        if self.on_gpu:
            from mpishare.plans.gpu.fields import place_of

            return place_of(array, name)
        return address_of(array), FieldLayout.of_host(array)

    def _span_of(self, array: Any, name: str) -> tuple[int, FieldLayout]:
        """Return the first address of an array, and its layout with all axes upwards from there."""
        address, layout = self._place_of(array, name)
        axes = zip(layout.shape, layout.strides, strict=True)
        back = sum((extent - 1) * step for extent, step in axes if step < 0)
        return address + back, replace(layout, strides=tuple(map(abs, layout.strides)))

    def fits(self, array: Any, side: Side) -> bool:
        """Whether the engines, which take only arrays that can be written, can use it as it is."""
        cells = side.as_cells(array)
        if not self.on_gpu and not cells.flags.writeable:
            return False
        return side.layout.is_like(self._place_of(cells, side.name)[1])

    def compact(self, array: Any, stream: Any) -> Any:
        """Return a copy without gaps."""
        with self.on(array, stream):
            if is_tensor(array):
                torch = sys.modules["torch"]
                return array.clone(memory_format=torch.contiguous_format)
            return array.copy(order="C")

    def copy_into(self, out: Any, array: Any, stream: Any) -> None:
        """Copy on the stream."""
        with self.on(out, stream):
            out[...] = array

    def share_memory(self, one: Any, other: Any) -> bool:
        """Whether the spans of two arrays overlap: those of interleaved cells count too."""
        (a, of_a), (b, of_b) = (self._span_of(each, "an array") for each in (one, other))
        a_nbytes, b_nbytes = of_a.span_nbytes, of_b.span_nbytes
        return bool(a_nbytes and b_nbytes and a < b + b_nbytes and b < a + a_nbytes)

    def on(self, array: Any, stream: Any) -> Any:
        """Make a stream the current one of the library of an array."""
        if stream is None or not self.on_gpu:
            return nullcontext()
        from mpishare.plans.gpu.fields import with_current

        return with_current(stream, array)

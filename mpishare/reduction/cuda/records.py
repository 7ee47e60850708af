"""Records of fields and buffers: arguments of the kernels."""

from __future__ import annotations

import ctypes
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from mpishare.errors import UnsupportedError
from mpishare.plans.cells import Cells, loops
from mpishare.plans.message import padded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.memory.types import Order
    from mpishare.plans.cells import Loop
    from mpishare.reduction.operation import Operation

MAX_AXES = 8
PACK_NBYTES = 16
FLAG_NBYTES = 32
_ALIGN = 128


class Shape(ctypes.Structure):
    """The shape and strides of a field; ``struct Shape`` of elements.cuh."""

    _fields_ = (
        ("step", ctypes.c_int64 * MAX_AXES),
        ("extent", ctypes.c_uint64 * MAX_AXES),
        ("magic", ctypes.c_uint32 * MAX_AXES),
        ("shift", ctypes.c_uint32 * MAX_AXES),
        ("axes", ctypes.c_int),
        ("unused", ctypes.c_int),
    )


class Staging(ctypes.Structure):
    """The staging buffers of large fields; ``struct Staging`` of large.cu."""

    _fields_ = (
        ("count", ctypes.c_uint64),
        ("slice", ctypes.c_uint64),
        ("chunk", ctypes.c_uint),
        ("chunks", ctypes.c_uint),
        ("sent_flags", ctypes.c_uint64),
        ("reduced_flags", ctypes.c_uint64),
        ("sent", ctypes.c_uint64),
        ("reduced", ctypes.c_uint64),
    )


SIZE_OPTIONS = tuple(f"-D{each.__name__}_nbytes={ctypes.sizeof(each)}" for each in (Shape, Staging))

Strides = tuple[int, ...]
Form = Literal["ROW", "NEAR", "FAR"]
"""Elements: contiguous; along several axes, with counts and steps in bytes below 2^31; others."""
USUAL_FORMS: tuple[Form, ...] = ("ROW", "NEAR")


def options(operation: Operation, nranks: int, form: Form) -> tuple[str, ...]:
    """Return the compiler options of a kernel."""
    return (
        "--fmad=false",
        *operation.kernel_options,
        f"-DRANKS={nranks}",
        f"-DFORM={form}",
        *SIZE_OPTIONS,
    )


def shapes_of(
    extents: Sequence[int], strides: Sequence[Strides], itemsize: int, order: Order
) -> tuple[list[Shape], Form]:
    """Return the records of fields of one shape, numbered in `order`, and their form."""
    row = (itemsize,) * len(strides)
    ends = [Cells(0, tuple(extents), tuple(steps), {}) for steps in strides]
    fastest_last = range(len(extents)) if order == "C" else range(len(extents))[::-1]
    axes = _joined(loops(ends, itemsize, reversed(fastest_last)), row)
    if len(axes) > MAX_AXES:
        raise UnsupportedError(
            f"an array whose elements lie along {len(axes)} axes apart from each other: "
            f"{MAX_AXES} are allowed on CUDA"
        )
    shapes = [_shape(axes, field) for field in range(len(strides))]
    if len(axes) == 1 and axes[0][1] == row:
        return shapes, "ROW"
    largest = max(prod(extents), *(step for _, steps in axes for step in steps))
    return shapes, "NEAR" if largest < 1 << 31 else "FAR"


def _joined(found: Sequence[Loop], row: Strides) -> list[tuple[int, Strides]]:
    """Return loops as axes of elements, each an extent and the steps of all fields."""
    run, *outer = found
    axes = [(each.extent, each.steps) for each in reversed(outer)]
    count = run.extent // row[0]
    return axes if axes and count == 1 else [*axes, (count, row)]


def _shape(axes: Sequence[tuple[int, Strides]], field: int) -> Shape:
    shape = Shape(axes=len(axes))
    for axis, (extent, steps) in enumerate(axes):
        shape.extent[axis], shape.step[axis] = extent, steps[field]
        shape.magic[axis], shape.shift[axis] = _divider(extent)
    return shape


def _divider(number: int) -> tuple[int, int]:
    """Return the factor and the shift that divide by a number; see elements.cuh.

    Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994, figure 4.1;
    that any number below 2^31 times 2 stays below 2^32 saves the step for larger ones.
    """
    shift = max(number - 1, 0).bit_length()
    if not 0 < number < 1 << 31:
        return 0, 0  # an empty axis, or one of a far field
    return (((1 << shift) - number) << 32) // number + 1, shift


def order_by_strides(
    extents: Sequence[int], strides: Sequence[Strides]
) -> tuple[Sequence[int], Sequence[Strides]]:
    """Return the axes of fields, ordered so that the elements of the first are contiguous.

    For sums over the elements, in any order.
    """
    axes = sorted(range(len(extents)), key=lambda axis: -strides[0][axis])
    return [extents[axis] for axis in axes], [
        tuple(each[axis] for axis in axes) for each in strides
    ]


def staging_of(count: int, itemsize: int, nranks: int, chunk_nbytes: int) -> tuple[Staging, int]:
    """Return the layout of the staging buffers for so many elements, and its size in bytes."""
    packs = -(-count * itemsize // PACK_NBYTES)
    of_slice = -(-packs // nranks)
    chunk = chunk_nbytes // PACK_NBYTES
    chunks = -(-of_slice // chunk)
    flags = padded((nranks - 1) * chunks * FLAG_NBYTES, _ALIGN)
    data = (nranks - 1) * of_slice * PACK_NBYTES
    reduced = padded(2 * flags + data, _ALIGN)
    staging = Staging(count, of_slice, chunk, chunks, 0, flags, 2 * flags, reduced)
    return staging, int(staging.reduced) + data


def address_array(addresses: Sequence[int]) -> Any:
    """Return addresses as a record of a kernel: ``struct Peers``, ``struct Buffers``."""
    return (ctypes.c_uint64 * len(addresses))(*addresses)

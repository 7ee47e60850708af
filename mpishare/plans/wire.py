"""``wire=``: types in which cells travel, rounded once, to nearest; and how NumPy does it.

Kernels round by wire.cuh, C doubles to float32 by `single_line` of copy.c.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mpishare.memory.numbers import as_numbers, number_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.plans.fields import GivenFields
    from mpishare.plans.layout import FieldLayout
    from mpishare.plans.message import Message, MessageInfo

    Array = np.ndarray[Any, Any]
    AnyMessage = TypeVar("AnyMessage", Message, MessageInfo)

# Those of bfloat16 as their bits, since NumPy may lack it.
_CARRIERS = {"float32": "f4", "float16": "f2", "bfloat16": "u2"}
WIRES = {name: np.dtype(carrier) for name, carrier in _CARRIERS.items()}


def require_wire(wire: Any, found: GivenFields) -> str | None:
    """Return the user's ``wire=``, or raise unless it is a type that rounds all of these fields."""
    if wire is None:
        return None
    if not isinstance(wire, str) or wire not in WIRES:
        raise ValueError(f"wire must be one of {(*WIRES,)}, or None, not {wire!r}")
    for number, each in enumerate(() if found.takes_any else found.layouts):
        nbytes = float_nbytes(each.dtype)
        what = f"field {number} is of {each.dtype}, and wire={wire!r} is for"
        if not nbytes:
            remedy = as_numbers(each.dtype) or ": make a plan without wire= for this field"
            raise TypeError(f"{what} real or complex floats{remedy}")
        if nbytes <= WIRES[wire].itemsize:
            raise ValueError(f"{what} wider numbers: make a plan without wire= for this field")
    return wire


def float_nbytes(dtype: np.dtype[Any]) -> int:
    """Return the size of the floating point numbers that elements consist of; 0 for others."""
    number = number_of(dtype)
    if number is None or number.kind not in "fc":
        return 0
    return dtype.itemsize // (2 if number.kind == "c" else 1)


def narrowed(
    messages: Sequence[AnyMessage], layouts: Sequence[FieldLayout], wire: str | None
) -> Sequence[AnyMessage]:
    """Return the messages with the bytes of their parts on the way."""
    if wire is None:
        return messages

    def on_way(part: Any) -> Any:
        return part._replace(nbytes=wire_nbytes(part.nbytes, layouts[part.field].dtype, wire))

    return [each._replace(parts=tuple(map(on_way, each.parts))) for each in messages]


def wire_nbytes(nbytes: int, dtype: np.dtype[Any], wire: str | None) -> int:
    """Return what so many bytes of a field take on the way."""
    return nbytes if wire is None else nbytes // float_nbytes(dtype) * WIRES[wire].itemsize


def on_wire(cells: Array, wire: str | None) -> Array:
    """Return cells as they travel: complex numbers as two real ones along the last axis."""
    if wire is None:
        return cells
    wide = np.ascontiguousarray(cells).view(f"f{float_nbytes(cells.dtype)}")
    with np.errstate(all="ignore"):
        if wire != "bfloat16":
            return wide.astype(WIRES[wire])
        single = wide.astype("f4")
        bits = single.view("u4")
        # To odd: a float that is not exact is no tie, so that bits of it are rounded once.
        bits -= abs(single) > abs(wide)
        bits |= single != wide
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(wide), bits >> 16 | 0x40, rounded).astype("u2")


def off_wire(cells: Array, wire: str | None, dtype: np.dtype[Any]) -> Array:
    """Return cells that have travelled, in the dtype of their field."""
    if wire is None:
        return cells
    if wire == "bfloat16":
        cells = (cells.astype("u4") << 16).view("f4")
    return cells.astype(f"f{float_nbytes(dtype)}").view(dtype)

"""Windows of arrays of the user: copied into new memory, or shared in place."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.backends import Exported
from mpishare.errors import CudaError, UnsupportedError
from mpishare.memory.arguments import require_bool
from mpishare.memory.kinds import FREED, Kind, Refusal
from mpishare.memory.memory import ArrayLayout, WindowPart, compact_strides, span_nbytes
from mpishare.windows.allocate import Source, make_window
from mpishare.windows.arguments import agree, check_layout, check_name, owner_of
from mpishare.windows.undo import undoing

if TYPE_CHECKING:
    from mpishare.memory.memory import Shape
    from mpishare.runtime.context import NodeContext
    from mpishare.windows.window import Window

log = logging.getLogger("mpishare.window")

_ON_GPU = (2, 13)  # DLPack's device types kDLCUDA and kDLCUDAManaged


def share(
    context: NodeContext,
    source: Any,
    copy: Any,
    name: Any,
    *,
    owner: Any = None,
    is_each: bool = False,
    readonly: Any = False,
) -> Window:
    """Make a window of an array that one rank has or computes. Collective; see `Node.share`.

    Where it `is_each`, of an array of each rank; see `Node.share_each`.
    """
    call = "Node.share_each" if is_each else "Node.share"
    mine: list[Source] = []
    with undoing(context, call) as undo, ExitStack() as offered:

        def inspect() -> tuple[dict[str, Any], list[Any] | None]:
            same: dict[str, Any] = {"copy": check_copy(call, copy), "name": check_name(call, name)}
            if not is_each:
                same["owner"] = owner_of(context, call, owner)
                same["readonly"] = require_bool(f"{call} failed: ", "readonly", readonly)
            if same.get("owner", context.rank) != context.rank:
                return same, None
            own = inspect_source(context, call, source, copy, undo, offered, readonly=readonly)
            mine.append(own)
            if is_each:
                same["dtype"] = str(own.layout.dtype)
            return same, own.layout.pack()

        same, replies = agree(context, call, inspect)
        segments = {rank: ArrayLayout.unpack(reply) for rank, reply in enumerate(replies) if reply}
        own = mine[0] if mine else None
        window = make_window(
            context, call, segments, same.get("owner"), own, name=name, readonly=bool(readonly)
        )
    if own is not None and own.why_copied:
        text = "%s: rank %d's array was copied, not shared in place: %s"
        log.warning(text, window.name, context.rank, own.why_copied)
    return window


def check_copy(call: str, copy: Any) -> bool | None:
    if copy is None or isinstance(copy, bool):
        return copy
    raise TypeError(f"{call} failed: copy must be True, False or None, not {copy!r}")


def inspect_source(
    context: NodeContext,
    call: str,
    source: Any,
    copy: bool | None,
    undo: ExitStack,
    offered: ExitStack,
    place: str = "",
    *,
    readonly: bool = False,
) -> Source:
    """Return this rank's source, at a `place` among others; or raise why it cannot be shared.

    Memory in place is closed by `undo`; other ranks can open it until the end of `offered`.
    """
    what = call + place
    array = _as_array(context, what, source() if callable(source) else source)
    layout = check_layout(context, what, tuple(array.shape), np.dtype(array.dtype))
    is_host = isinstance(array, np.ndarray)
    if readonly and is_host:  # of CuPy there is no read-only view
        array = array.view()
        array.flags.writeable = False
    if layout.nbytes and not is_host and not context.in_place.is_alive(address_of(array)):
        # Its copy would end the GPU's context.
        raise UnsupportedError(f"{what} failed: {FREED.why}. {FREED.remedy}.")
    copied = layout._replace(strides=_f_strides(array))
    if copy is True or not layout.nbytes:
        return Source(copied, array)
    given = _export(context, array, copy)
    if isinstance(given, Exported):
        undo.callback(given.memory.close)
        offered.callback(given.retract)
        return Source(layout._replace(strides=tuple(array.strides)), array, given)
    if copy is False:
        raise UnsupportedError(
            f"{what} failed: the array cannot be shared in place (copy=False): {given.why}. "
            f"{given.remedy}."
        )
    return Source(copied, array, why_copied=given.why)


def _as_array(context: NodeContext, call: str, source: Any) -> Any:
    """Return the same memory as an array of NumPy or CuPy; a copy of any other value."""
    if source is None:
        raise TypeError(
            f"{call} failed: the source is None on rank {context.rank}. Give it an array; if "
            "another rank of a share() has it, name that rank: owner=..."
        )
    if isinstance(source, int) and not isinstance(source, bool):
        raise TypeError(
            f"{call} failed: {source} is an int, not an array. Wrap a number in numpy.array, an "
            "address in an array of its library (cupy.cuda.UnownedMemory)."
        )
    xp = context.backend.xp
    if isinstance(source, np.ndarray | xp.ndarray):
        return source
    if hasattr(source, "__cuda_array_interface__"):
        return xp.asarray(source)
    get_device = getattr(source, "__dlpack_device__", None)
    if get_device is not None and get_device()[0] in _ON_GPU:
        return xp.from_dlpack(source)
    return np.asarray(source)  # a tensor in host memory, a list


def _export(context: NodeContext, array: Any, copy: bool | None) -> Exported | Refusal:
    """Return the array's memory for other ranks to map, or the reason why to copy it."""
    address, span = address_of(array), _span(array)
    if isinstance(span, Refusal):
        return span
    if (part := _window_part(context, address, span)) is not None:
        return part
    try:
        given = context.in_place.export(array, address, span, is_host=isinstance(array, np.ndarray))
    except CudaError as error:
        if copy is False:
            raise
        return Refusal(str(error), "")
    doubt = given.doubt if isinstance(given, Exported) and copy is None else None
    return doubt or given


def _span(array: Any) -> int | Refusal:
    """Return the bytes from the first element of an array to the end of the last."""
    axes = zip(array.shape, array.strides, strict=True)
    span = span_nbytes(array.shape, array.strides, array.dtype.itemsize)
    why = ""
    if any(extent > 1 and step <= 0 for extent, step in axes):
        why = f"its strides are {array.strides}, and must be positive"
    elif span < array.size * array.dtype.itemsize:
        why = f"several of its elements are in the same memory: its strides are {array.strides}"
    remedy = "Share the array that it is a view of, or pass copy=True"
    return Refusal(why, remedy) if why else span


def _window_part(context: NodeContext, address: int, nbytes: int) -> Exported | None:
    """Return memory as a part of an open window; None if it is in none."""
    location = context.locate(address, nbytes)
    whole = location and context.segment_memory(location.window, location.rank)
    if location is None or whole is None or whole.is_given:  # which outlives that window
        return None
    token = f"{location.window}:{location.rank}"
    part = WindowPart(whole, location.offset, nbytes)
    return Exported(part, Kind.WINDOW, token, location.offset, whole.nbytes)


def address_of(array: Any) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def _f_strides(array: Any) -> Shape | None:
    """Return the strides of the array's copy: Fortran's if it is in that order, else None for C."""
    if array.flags.c_contiguous or not array.flags.f_contiguous:
        return None
    return compact_strides(array.shape, array.dtype.itemsize, range(array.ndim)[::-1])

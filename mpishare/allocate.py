"""How a window comes to be: its owner allocates and shares the handle, and every rank maps it."""

from __future__ import annotations

import operator
import pickle
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare import ranges
from mpishare.coordination.agreement import require_same
from mpishare.errors import MpiShareError, UnsupportedError, format_nbytes
from mpishare.ordering.epochs import epoch_counters
from mpishare.viewers.names import check_name
from mpishare.viewers.publication import Publication
from mpishare.window import Window

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.backends import Memory
    from mpishare.context import NodeContext

    Shape = tuple[int, ...]

_CUDA_DTYPES = "?bhilqBHILQefdFD"
"""Type characters of the dtypes that CuPy has."""


def allocate(
    context: NodeContext, shape: Any, dtype: Any, fill: Any, owner: Any, *, name: Any = None
) -> Window:
    """Make a window that one rank allocates. Collective; see `Node.allocate`."""
    call = "Node.allocate"

    def check() -> dict[str, Any]:
        layout = _layout(context, call, shape, dtype)
        return {
            "shape": list(layout[0]),
            "dtype": str(layout[1]),
            "fill": _describe_fill(call, fill, layout[1]),
            "owner": _owner(context, call, owner),
            "name": check_name(call, name),
        }

    arguments = context.agreement.step(call, check)
    require_same(call, arguments, context.rank)
    owner = arguments[0]["owner"]
    shapes: list[Shape | None] = [None] * context.size
    shapes[owner] = tuple(arguments[0]["shape"])
    return _make_window(context, call, shapes, np.dtype(dtype), owner, _filler(fill), name=name)


def allocate_each(
    context: NodeContext, shape: Any, dtype: Any, fill: Any, *, name: Any = None
) -> Window:
    """Make a window with a segment that each rank allocates. Collective."""
    call = "Node.allocate_each"

    def check() -> tuple[list[int], dict[str, Any]]:
        layout = _layout(context, call, shape, dtype)
        _describe_fill(call, fill, layout[1])
        return list(layout[0]), {"dtype": str(layout[1]), "name": check_name(call, name)}

    arguments = context.agreement.step(call, check)
    require_same(call, [common for _, common in arguments], context.rank)
    shapes: list[Shape | None] = [tuple(extents) for extents, _ in arguments]
    return _make_window(context, call, shapes, np.dtype(dtype), None, _filler(fill), name=name)


def share(context: NodeContext, source: Any, owner: Any, *, name: Any = None) -> Window:
    """Make a window of an array that one rank has or computes. Collective; see `Node.share`."""
    call = "Node.share"
    sources: list[Any] = []

    def evaluate() -> dict[str, Any]:
        rank = _owner(context, call, owner)
        common = {"owner": rank, "name": check_name(call, name)}
        if context.rank != rank:
            return common
        array = source() if callable(source) else source
        if not isinstance(getattr(array, "dtype", None), np.dtype):
            is_on_gpu = hasattr(array, "__cuda_array_interface__")
            array = (context.backend.xp if is_on_gpu else np).asarray(array)  # a tensor, a list
        shape, dtype = _layout(context, call, tuple(array.shape), np.dtype(array.dtype))
        sources.append(array)
        return common | {"shape": list(shape), "dtype": pickle.dumps(dtype).hex()}

    replies = context.agreement.step(call, evaluate)
    given = [{key: reply[key] for key in ("owner", "name")} for reply in replies]
    require_same(call, given, context.rank)
    owner = replies[0]["owner"]
    # From a rank of the same job: nothing that could be forged further than the job itself.
    dtype = pickle.loads(bytes.fromhex(replies[owner]["dtype"]))  # noqa: S301
    shapes: list[Shape | None] = [None] * context.size
    shapes[owner] = tuple(replies[owner]["shape"])

    def copy(array: Any) -> None:
        array[...] = context.backend.xp.asarray(sources[0])

    return _make_window(context, call, shapes, dtype, owner, copy, name=name)


def _make_window(
    context: NodeContext,
    call: str,
    shapes: list[Shape | None],
    dtype: np.dtype[Any],
    owner: int | None,
    write: Callable[[Any], None] | None,
    *,
    name: str | None = None,
) -> Window:
    """Allocate, share the handle, and map, each on all ranks before any goes on. Collective.

    Parameters
    ----------
    shapes : list of tuple of int or None
        For each rank, its segment; None for a rank that has none.
    write : callable, optional
        Writes this rank's segment before the others map it.
    """
    memories: list[Memory | None] = [None] * context.size
    published: list[str] = []
    publication: Publication | None = None
    agreement, backend, rank = context.agreement, context.backend, context.rank

    def create() -> None:
        shape = shapes[rank]
        if shape is not None:
            nbytes = _nbytes(shape, dtype)
            memories[rank] = memory = backend.allocate(nbytes)
            if write is not None and nbytes:
                write(memory.array(shape, dtype))
                context.synchronize(None, call)

    def publish() -> str:
        shape, memory = shapes[rank], memories[rank]
        if shape is None or memory is None:
            return ""
        published.append(backend.publish(memory))
        return context.handle(published[0], 0, _nbytes(shape, dtype), memory.nbytes)

    def open_others() -> None:
        for other, shape in enumerate(shapes):
            if other != rank and shape is not None:
                handle = context.open_handle(handles[other], other, _nbytes(shape, dtype))
                memories[other] = backend.open(handle.token, handle.capacity, handle.uuid)

    with ranges.span(call):
        try:
            agreement.step(call, create)
            handles = agreement.step(call, publish)
            agreement.step(call, open_others)
            if name is not None:
                publication = Publication(context, call, name, handles, shapes, dtype)
            counters = context.take_counters(call, epoch_counters(context.size))
        except BaseException as error:
            _clear_frames(error)
            if publication is not None:
                publication.discard()
            _undo(context, call, memories)
            raise
        finally:
            for token in published:
                backend.retract(token)
        number = context.next_number("window")
        return Window(
            context, number, counters, memories, shapes, dtype, owner, publication=publication
        )


def _clear_frames(error: BaseException | None) -> None:
    """Release the arrays that the frames of an error hold: their memory is about to go."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _undo(context: NodeContext, call: str, memories: list[Memory | None]) -> None:
    """Free the memory of a failed call: importers first, as in `close`."""

    def release() -> None:
        for rank, memory in enumerate(memories):
            if rank != context.rank and memory is not None:
                memory.close()

    try:
        context.agreement.step(call, release)
    except MpiShareError:
        # The node itself is broken: others may still map this memory, so it is left to the end of
        # the process. The error that brought us here says more than this one.
        return
    mine = memories[context.rank]
    if mine is not None:
        mine.close()


def _layout(context: NodeContext, call: str, shape: Any, dtype: Any) -> tuple[Shape, np.dtype[Any]]:
    """Return shape and dtype as they are used, or raise what the user must change."""
    extents = shape if isinstance(shape, tuple | list) else (shape,)
    try:
        sizes = tuple(operator.index(extent) for extent in extents)
    except TypeError:
        raise TypeError(f"{call} failed: shape must be ints, not {shape!r}") from None
    if any(size < 0 for size in sizes):
        raise ValueError(f"{call} failed: negative extents in shape {sizes}")
    try:
        found = np.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"{call} failed: {error}") from None
    if found.hasobject:
        raise TypeError(
            f"{call} failed: dtype {found} holds Python objects, which cannot be shared"
        )
    is_native = found.char in _CUDA_DTYPES and found.isnative
    if context.backend.name == "cuda" and not is_native:
        raise UnsupportedError(
            f"{call} failed: CuPy has no dtype {found}. Share its bytes: dtype='u1'."
        )
    if _nbytes(sizes, found) >= 1 << 62:
        size = format_nbytes(_nbytes(sizes, found))
        raise ValueError(
            f"{call} failed: shape {sizes} of {found} needs {size}, more than can be addressed"
        )
    return sizes, found


def _nbytes(shape: Shape, dtype: np.dtype[Any]) -> int:
    return int(np.prod(shape, dtype=object)) * dtype.itemsize


def _owner(context: NodeContext, call: str, owner: Any) -> int:
    return 0 if owner is None else context.rank_of(call, owner)


def _describe_fill(call: str, fill: Any, dtype: np.dtype[Any]) -> str | None:
    """Return the value as text that differs where the value does; raises where it does not fit."""
    if fill is None:
        return None
    if np.ndim(fill):
        raise ValueError(f"{call} failed: fill must be a scalar, not of shape {np.shape(fill)}")
    try:
        value = np.full((), fill, dtype=dtype)
    except (OverflowError, ValueError) as error:
        raise ValueError(f"{call} failed: fill={fill!r} does not fit {dtype}") from error
    # All NaNs have the same text; a NaN alone differs from itself.
    return str(value) if value == value else f"{value}, {value.tobytes().hex()}"


def _filler(fill: Any) -> Callable[[Any], None] | None:
    if fill is None:
        return None

    def write(array: Any) -> None:
        array[...] = fill

    return write

"""Creation of a window: its owner allocates and shares the handle, and every rank maps it."""

from __future__ import annotations

import math
import operator
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.coordination.agreement import require_same
from mpishare.errors import ClosedError, MpiShareError, UnsupportedError, format_nbytes
from mpishare.memory.kinds import Kind
from mpishare.memory.numbers import number_of
from mpishare.runtime import ranges
from mpishare.windows.epochs import epoch_counters
from mpishare.windows.names import check_name
from mpishare.windows.publication import Publication
from mpishare.windows.segment import EmptyMemory, Segment, WindowPart
from mpishare.windows.window import Window

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.backends import Exported, Memory
    from mpishare.memory.handle import Handle
    from mpishare.runtime.context import NodeContext

    Shape = tuple[int, ...]


def allocate(
    context: NodeContext, shape: Any, dtype: Any, fill: Any, owner: Any, *, name: Any = None
) -> Window:
    """Make a window that one rank allocates. Collective; see `Node.allocate`."""
    call = "Node.allocate"

    def check() -> dict[str, Any]:
        layout = check_layout(context, call, shape, dtype)
        return {
            "shape": list(layout[0]),
            "dtype": str(layout[1]),
            "fill": _describe_fill(call, fill, layout[1]),
            "owner": owner_rank(context, call, owner),
            "name": check_name(call, name),
        }

    arguments = context.begin(call, check)
    require_same(call, arguments, context.rank)
    owner = arguments[0]["owner"]
    segments: list[Segment | None] = [None] * context.size
    segments[owner] = Segment(tuple(arguments[0]["shape"]))
    return make_window(context, call, segments, np.dtype(dtype), owner, _filler(fill), name=name)


def allocate_each(
    context: NodeContext, shape: Any, dtype: Any, fill: Any, *, name: Any = None
) -> Window:
    """Make a window with a segment of each rank. Collective; see `Node.allocate_each`."""
    call = "Node.allocate_each"

    def check() -> tuple[list[int], dict[str, Any]]:
        layout = check_layout(context, call, shape, dtype)
        _describe_fill(call, fill, layout[1])
        return list(layout[0]), {"dtype": str(layout[1]), "name": check_name(call, name)}

    arguments = context.begin(call, check)
    require_same(call, [common for _, common in arguments], context.rank)
    segments = [Segment(tuple(extents)) for extents, _ in arguments]
    return make_window(context, call, segments, np.dtype(dtype), None, _filler(fill), name=name)


def make_window(
    context: NodeContext,
    call: str,
    segments: Sequence[Segment | None],
    dtype: np.dtype[Any],
    owner: int | None,
    write: Callable[[Any], None] | None,
    exported: Exported | None = None,
    *,
    name: str | None = None,
    is_part: bool = False,
) -> Window:
    """Allocate, share the handle, and map, each on all ranks before any goes on. Collective.

    Ranks without a segment have None in `segments`. `write` fills this rank's segment before the
    others map it. `exported` is memory of another library that becomes this rank's segment. A
    window that `is_part` of another object is closed by that.
    """
    memories: list[Memory | None] = [None] * context.size
    opened: list[Handle | None] = [None] * context.size
    published: list[str] = []
    publication: Publication | None = None
    agreement, backend, rank = context.agreement, context.backend, context.rank
    mine = segments[rank]

    def create() -> None:
        if exported is not None:
            memories[rank] = exported.memory
            context.drain(call)  # the work on any stream is in the array now
        elif mine is not None:
            nbytes = nbytes_of(mine.shape, dtype)
            memories[rank] = memory = backend.allocate(nbytes)
            if write is not None and nbytes:
                write(memory.array(mine.shape, dtype, mine.strides))
                context.synchronize(None, call)

    def publish() -> str:
        memory = memories[rank]
        if mine is None or memory is None:
            return ""
        if exported is not None:
            place = exported.offset, memory.nbytes, exported.capacity
            return context.handle(exported.token, *place, exported.kind)
        published.append(backend.publish(memory))
        return context.handle(published[0], 0, nbytes_of(mine.shape, dtype), memory.nbytes)

    def open_others() -> None:
        for other, segment in enumerate(segments):
            if segment is not None and (other != rank or name is not None):
                nbytes = nbytes_of(segment.shape, dtype)
                opened[other] = handle = context.open_handle(handles[other], other, nbytes)
                if other != rank:
                    memories[other] = open_memory(context, handle, other)

    with ranges.span(call):
        try:
            agreement.step(call, create)
            handles = agreement.step(call, publish)
            agreement.step(call, open_others)
            if name is not None:
                publication = Publication(context, call, name, segments, opened, dtype)
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
            context,
            number,
            counters,
            memories,
            segments,
            dtype,
            owner,
            publication=publication,
            is_part=is_part,
        )


def open_memory(context: NodeContext, handle: Handle, rank: int) -> Memory:
    """Map memory of another rank, as its kind demands."""
    if handle.kind == Kind.ALLOCATION:
        return context.backend.open(handle.token, handle.capacity, handle.uuid)
    if handle.kind == Kind.EMPTY:
        return EmptyMemory(context.backend.xp)
    if handle.kind == Kind.WINDOW:
        window, segment = map(int, handle.token.split(":"))
        whole = context.segment_memory(window, segment)
        if whole is None:
            raise ClosedError(f"window {window}, which holds the array of rank {rank}, is closed")
        return WindowPart(whole, handle.offset, handle.nbytes)
    return context.in_place.open(handle, rank)


def _clear_frames(error: BaseException | None) -> None:
    """Release the arrays in the frames of an error: their memory is about to be freed."""
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
        # The node itself is broken: others may still map this memory, so it stays until the end of
        # the process. The first error explains more than this one.
        return
    mine = memories[context.rank]
    if mine is not None:
        mine.close()


def check_layout(
    context: NodeContext, call: str, shape: Any, dtype: Any
) -> tuple[Shape, np.dtype[Any]]:
    """Return shape and dtype in canonical form, or raise why they cannot be used."""
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
    is_cupys = found.isbuiltin == 1 and number_of(found) is not None
    if context.backend.name == "cuda" and not is_cupys:
        raise UnsupportedError(
            f"{call} failed: CuPy has no dtype {found}. Share its bytes: dtype='u1'."
        )
    if nbytes_of(sizes, found) >= 1 << 62:
        size = format_nbytes(nbytes_of(sizes, found))
        raise ValueError(
            f"{call} failed: shape {sizes} of {found} needs {size}, more than can be addressed"
        )
    return sizes, found


def nbytes_of(shape: Shape, dtype: np.dtype[Any]) -> int:
    return math.prod(shape) * dtype.itemsize


def owner_rank(context: NodeContext, call: str, owner: Any) -> int:
    """Return the rank that the user gave as the owner, by default the leader."""
    return 0 if owner is None else context.rank_of(call, owner)


def _describe_fill(call: str, fill: Any, dtype: np.dtype[Any]) -> str | None:
    """Return the value as text that differs where the value does; raises where it does not fit."""
    if fill is None:
        return None
    if np.ndim(fill) and dtype.names is None:
        raise ValueError(f"{call} failed: fill must be a scalar, not of shape {np.shape(fill)}")
    value = np.empty((), dtype.base)
    try:
        with np.errstate(over="raise", invalid="raise"):
            value[...] = fill
        is_kept = _is_kept(fill, value)
    except (ArithmeticError, TypeError, ValueError, DeprecationWarning) as error:
        # NumPy 1 warns of an integer that does not fit, and warnings may be errors.
        raise ValueError(f"{call} failed: fill={fill!r} does not fit {dtype}") from error
    if not is_kept:
        raise ValueError(f"{call} failed: fill={fill!r} does not fit {dtype}: it would be {value}")
    # All NaNs have the same text; a NaN alone differs from itself.
    return str(value) if value == value else f"{value}, {value.tobytes().hex()}"


def _is_kept(fill: Any, value: np.ndarray[Any, Any]) -> bool:
    """Whether NumPy's cast to `value` changed no more than a float's last digits."""
    if value.dtype.kind in "fcV":
        return True
    # NaT differs from itself.
    return bool(value != value or value.astype(np.asarray(fill).dtype) == fill)


def _filler(fill: Any) -> Callable[[Any], None] | None:
    if fill is None:
        return None

    def write(array: Any) -> None:
        array[...] = fill

    return write

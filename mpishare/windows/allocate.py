"""Creation of a window: its owner allocates and shares the handle, and every rank maps it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpishare.backends import Exported
from mpishare.coordination.agreement import require_same
from mpishare.coordination.arguments import is_int
from mpishare.errors import UnsupportedError, format_nbytes
from mpishare.memory.numbers import number_of
from mpishare.runtime import ranges
from mpishare.windows.epochs import epoch_counters
from mpishare.windows.names import check_name
from mpishare.windows.publication import Publication
from mpishare.windows.segment import Segment, open_memory
from mpishare.windows.undo import undoing
from mpishare.windows.window import Window

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.memory.handle import Handle
    from mpishare.memory.memory import Memory
    from mpishare.runtime.context import NodeContext
    from mpishare.windows.undo import Undo

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
    context: NodeContext, shape: Any, dtype: Any, fill: Any, *, name: Any = None, signals: Any = 0
) -> Window:
    """Make a window with a segment of each rank. Collective; see `Node.allocate_each`."""
    call = "Node.allocate_each"

    def check() -> tuple[list[int], dict[str, Any]]:
        layout = check_layout(context, call, shape, dtype)
        _describe_fill(call, fill, layout[1])
        if isinstance(signals, bool) or not isinstance(signals, int | np.integer) or signals < 0:
            raise ValueError(
                f"{call} failed: signals={signals!r} is not a number of signals: give an int of 0 "
                "or more"
            )
        common = {"dtype": str(layout[1]), "name": check_name(call, name), "signals": int(signals)}
        return list(layout[0]), common

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
    sizes = [[] if each is None else [nbytes_of(each.shape, dtype)] for each in segments]

    def fill(segment: Segment, memory: Memory) -> None:
        if write is not None:
            write(memory.array(segment.shape, dtype, segment.strides))

    given: list[Given] = []
    if (mine := segments[context.rank]) is not None:
        is_filled = write is not None and nbytes_of(mine.shape, dtype)
        given = [exported or (partial(fill, mine) if is_filled else None)]
    with ranges.span(call), undoing(context, call) as undo, ExitStack() as published:
        new = NewMemory(context, call, sizes, undo, published)
        # Viewers map this rank's own memory by its handle, too.
        packed, opened, found = new.share(given, opens_mine=name is not None)
        memories = [next(iter(each), None) for each in found]
        publication: Publication | None = None
        if name is not None:
            first = [next(iter(each), None) for each in opened]
            publication = Publication(context, call, name, segments, first, dtype)
            undo.local.callback(publication.discard)
        counters = context.take_counters(call, epoch_counters(context.size))
    number = context.next_number("window")
    return Window(
        context,
        number,
        counters,
        memories,
        segments,
        dtype,
        owner,
        handles=[next(iter(each), "") for each in packed],
        publication=publication,
        is_part=is_part,
    )


Given = Exported | Callable[["Memory"], None] | None
"""Memory of another library, or what fills new memory."""


class NewMemory(NamedTuple):
    """The steps that share new or exported memory; `sizes` are those of each rank, in bytes."""

    context: NodeContext
    call: str
    sizes: Sequence[Sequence[int]]
    undo: Undo
    published: ExitStack

    def share(
        self, given: Sequence[Given], *, opens_mine: bool = False
    ) -> tuple[list[list[str]], list[list[Handle]], list[list[Memory]]]:
        """Return three lists by rank: all handles, the opened handles, the memories. Collective.

        `given` has, for each memory of this rank, that of another library, or what fills a new one,
        if anything does.
        """
        step = partial(self.context.agreement.step_keeping, self.call)
        mine, _ = step(partial(self._create, given))
        _, handles = step(partial(self._publish, given, mine))
        (opened, memories), _ = step(partial(self._open, handles, opens_mine=opens_mine))
        memories[self.context.rank] = mine
        return handles, opened, memories

    def _create(self, given: Sequence[Given]) -> tuple[list[Memory], None]:
        """Return the memories of this rank, with their values."""
        context = self.context
        made: list[Memory] = []
        for nbytes, each in zip(self.sizes[context.rank], given, strict=True):
            if isinstance(each, Exported):
                memory, fill = each.memory, None
            else:
                memory, fill = self._allocate(nbytes), each
            self.undo.made.callback(memory.close)
            made.append(memory)
            if fill is not None:
                fill(memory)
        if any(isinstance(each, Exported) for each in given):
            context.drain(self.call)  # the work on any stream is in the arrays now
        elif any(given):
            context.synchronize(None, self.call)
        return made, None

    def _allocate(self, nbytes: int) -> Memory:
        try:
            return self.context.backend.allocate(nbytes)
        except UnsupportedError as error:
            error.args = (f"{self.call} failed: {error}",)
            raise

    def _publish(self, given: Sequence[Given], made: Sequence[Memory]) -> tuple[None, list[str]]:
        """Return the handles of this rank's memories."""
        context, handles = self.context, list[str]()
        for nbytes, each, memory in zip(self.sizes[context.rank], given, made, strict=True):
            if isinstance(each, Exported):
                place = each.offset, memory.nbytes, each.capacity
                handles.append(context.handle(each.token, *place, each.kind))
            else:
                token = context.backend.publish(memory)
                self.published.callback(context.backend.retract, token)
                handles.append(context.handle(token, 0, nbytes, memory.nbytes))
        return None, handles

    def _open(
        self, handles: Sequence[Sequence[str]], *, opens_mine: bool
    ) -> tuple[tuple[list[list[Handle]], list[list[Memory]]], None]:
        """Return the handles by rank, and the other ranks' memories, mapped."""
        context = self.context
        opened: list[list[Handle]] = [[] for _ in handles]
        memories: list[list[Memory]] = [[] for _ in handles]
        for rank, sizes in enumerate(self.sizes):
            is_mine = rank == context.rank
            if is_mine and not opens_mine:
                continue
            for packed, nbytes in zip(handles[rank], sizes, strict=True):
                handle = context.open_handle(packed, rank, nbytes)
                opened[rank].append(handle)
                if not is_mine:
                    memory = open_memory(context, handle, rank)
                    memories[rank].append(memory)
                    self.undo.opened.callback(memory.close)
        return (opened, memories), None


def check_layout(
    context: NodeContext, call: str, shape: Any, dtype: Any
) -> tuple[Shape, np.dtype[Any]]:
    """Return shape and dtype in canonical form, or raise why they cannot be used."""
    sizes = _extents(call, shape)
    try:
        found = np.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"{call} failed: {error}") from None
    if found.hasobject:
        raise TypeError(
            f"{call} failed: dtype {found} holds Python objects, which cannot be shared"
        )
    if context.backend.name == "cuda" and (found.isbuiltin != 1 or number_of(found) is None):
        raise UnsupportedError(
            f"{call} failed: CuPy has no dtype {found}. Share its bytes: dtype='u1'."
        )
    if nbytes_of(sizes, found) >= 1 << 62:
        size = format_nbytes(nbytes_of(sizes, found))
        raise ValueError(
            f"{call} failed: shape {sizes} of {found} needs {size}, more than can be addressed"
        )
    return sizes, found


def _extents(call: str, shape: Any) -> Shape:
    extents = shape if isinstance(shape, tuple | list) else (shape,)
    if not all(map(is_int, extents)):
        raise TypeError(f"{call} failed: shape must be ints, not {shape!r}")
    sizes = tuple(map(operator.index, extents))
    if min(sizes, default=0) < 0:
        raise ValueError(f"{call} failed: negative extents in shape {sizes}")
    return sizes


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

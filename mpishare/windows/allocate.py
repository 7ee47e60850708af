"""Creation of a window: its owner allocates and shares the handle, and every rank maps it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.backends import Exported
from mpishare.errors import UnsupportedError
from mpishare.memory.arguments import is_int
from mpishare.memory.memory import ArrayLayout
from mpishare.runtime import ranges
from mpishare.windows.arguments import agree, check_layout, owner_of
from mpishare.windows.epochs import epoch_counters
from mpishare.windows.names import check_name
from mpishare.windows.publication import Publication
from mpishare.windows.segment import open_memory
from mpishare.windows.undo import undoing
from mpishare.windows.window import Window

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mpishare.memory.memory import Memory
    from mpishare.runtime.context import NodeContext
    from mpishare.windows.undo import Undo


def allocate(
    context: NodeContext,
    shape: Any,
    dtype: Any,
    fill: Any,
    name: Any,
    *,
    owner: Any = None,
    is_each: bool = False,
    signals: Any = 0,
) -> Window:
    """Make a window of new memory. Collective; see `Node.allocate`.

    Where it `is_each`, each rank allocates a segment; see `Node.allocate_each`.
    """
    call = "Node.allocate_each" if is_each else "Node.allocate"

    def check() -> tuple[dict[str, Any], list[Any]]:
        mine = check_layout(context, call, shape, dtype)
        same: dict[str, Any] = {"dtype": str(mine.dtype), "name": check_name(call, name)}
        value = _describe_fill(call, fill, mine.dtype)
        if is_each:
            same["signals"] = _check_signals(call, signals)
        else:
            same |= {"shape": mine.shape, "fill": value, "owner": owner_of(context, call, owner)}
        return same, list(mine.shape)

    same, shapes = agree(context, call, check)
    rank = same.get("owner")
    segments = {
        r: ArrayLayout(tuple(each), np.dtype(dtype))
        for r, each in enumerate(shapes)
        if rank in (None, r)
    }
    values = None if fill is None else lambda: fill
    return make_window(context, call, segments, rank, values, name=name)


def make_window(
    context: NodeContext,
    call: str,
    segments: Mapping[int, ArrayLayout],
    owner: int | None,
    contents: Exported | Callable[[], Any] | None,
    *,
    name: str | None = None,
    is_part: bool = False,
) -> Window:
    """Allocate, share the handle, and map, each on all ranks before any goes on. Collective.

    `segments` has those of the ranks that have one. `contents` is memory of another library that
    becomes this rank's segment, or returns the values of this rank's segment before the others map
    it. A window that `is_part` of another object is closed by that.
    """
    sizes = [[segments[r].nbytes] if r in segments else [] for r in range(context.size)]
    mine = [segments[context.rank]] if context.rank in segments else []
    given = [partial(_write, each, contents) if callable(contents) else contents for each in mine]
    with ranges.span(call), undoing(context, call) as undo:
        shared = share_memory(context, call, sizes, given, undo)
        handles, memories = _firsts(shared[0]), _firsts(shared[1])
        publication: Publication | None = None
        if name is not None:
            publication = Publication(context, call, name, segments, handles)
            undo.local.callback(publication.discard)
        counters = context.take_counters(call, epoch_counters(context.size))
    return Window(
        context,
        counters,
        segments,
        memories,
        handles,
        owner,
        publication=publication,
        is_part=is_part,
    )


def _firsts(by_rank: Sequence[Sequence[Any]]) -> dict[int, Any]:
    return {rank: each[0] for rank, each in enumerate(by_rank) if each}


Given = Exported | Callable[["Memory"], None] | None
"""Memory of another library, or what fills new memory."""


def _write(layout: ArrayLayout, values: Callable[[], Any], memory: Memory) -> None:
    if layout.nbytes:
        memory.view(layout)[...] = values()


def share_memory(
    context: NodeContext,
    call: str,
    sizes: Sequence[Sequence[int]],
    given: Sequence[Given],
    undo: Undo,
) -> tuple[list[list[str]], list[list[Memory]]]:
    """Share new or exported memories of these sizes by rank; return handles and memories by rank.

    `given` has, for each memory of this rank, that of another library, or what fills a new one, if
    anything does. Collective.
    """
    sizes_here = sizes[context.rank]

    def create() -> tuple[list[Memory], None]:
        made = [_make(context, call, *each, undo) for each in zip(sizes_here, given, strict=True)]
        if any(isinstance(each, Exported) for each in given):
            context.drain(call)  # the work on any stream is in the arrays now
        elif any(given):
            context.synchronize(None, call)
        return made, None

    def publish() -> tuple[None, list[str]]:
        each_here = zip(sizes_here, given, mine, strict=True)
        return None, [_publish(context, *each, undo) for each in each_here]

    def open_others() -> tuple[list[list[Memory]], None]:
        memories: list[list[Memory]] = [[] for _ in sizes]
        for rank in context.agreement.others:
            for packed, nbytes in zip(handles[rank], sizes[rank], strict=True):
                memory = open_memory(context, context.open_handle(packed, rank, nbytes), rank)
                undo.opened.callback(memory.close)
                memories[rank].append(memory)
        memories[context.rank] = mine
        return memories, None

    step = partial(context.agreement.step_keeping, call)
    mine, _ = step(create)
    _, handles = step(publish)
    memories, _ = step(open_others)
    return handles, memories


def _make(context: NodeContext, call: str, nbytes: int, given: Given, undo: Undo) -> Memory:
    try:
        memory = given.memory if isinstance(given, Exported) else context.backend.allocate(nbytes)
    except UnsupportedError as error:
        raise UnsupportedError(f"{call} failed: {error}") from error
    undo.made.callback(memory.close)
    if callable(given):
        given(memory)
    return memory


def _publish(context: NodeContext, nbytes: int, given: Given, memory: Memory, undo: Undo) -> str:
    if isinstance(given, Exported):
        return context.handle(given.token, given.offset, memory.nbytes, given.capacity, given.kind)
    token = context.backend.publish(memory)
    undo.lent.callback(context.backend.retract, token)
    return context.handle(token, 0, nbytes, memory.nbytes)


def _check_signals(call: str, signals: Any) -> int:
    if not is_int(signals) or signals < 0:
        raise ValueError(
            f"{call} failed: signals={signals!r} is not a number of signals: give an int of 0 or "
            "more"
        )
    return int(signals)


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

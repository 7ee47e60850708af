"""Creation of windows: a rank allocates and shares the handle, and every rank maps the memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mpishare.backends.suballocator import rounded
from mpishare.errors import ClosedError, UnsupportedError
from mpishare.memory.arguments import is_int
from mpishare.memory.handle import Handle
from mpishare.memory.kinds import Kind
from mpishare.memory.memory import ArrayLayout, WindowPart, cut
from mpishare.windows.arguments import agree, check_layout, check_name, owner_of
from mpishare.windows.epochs import epoch_counters
from mpishare.windows.small import small_blocks
from mpishare.windows.undo import meet_in, undoing
from mpishare.windows.window import Window

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.backends import Exported
    from mpishare.backends.host import HostBlock
    from mpishare.memory.memory import Memory
    from mpishare.runtime.context import NodeContext
    from mpishare.windows.publisher import Publication


Lot: TypeAlias = Mapping[int, ArrayLayout]
"""One memory of a rank: the segments that lie in it, by the places of their windows in a call."""


@dataclass
class Source:
    """What becomes a segment of this rank: new memory, or that of an array in place."""

    layout: ArrayLayout
    values: Any = None  # of new memory: an array or a scalar; without them it is not set
    exported: Exported | None = None
    why_copied: str = ""


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
    context.release_many()
    blocks = small_blocks(context, call)
    block: HostBlock | None = None

    def check() -> tuple[dict[str, Any], list[Any]]:
        nonlocal block
        mine = check_layout(context, call, shape, dtype)
        same: dict[str, Any] = {"dtype": str(mine.dtype), "name": check_name(call, name)}
        value = _describe_fill(call, fill, mine.dtype)
        if is_each:
            same["signals"] = _check_signals(call, signals)
        else:
            same |= {"shape": mine.shape, "fill": value, "owner": owner_of(context, call, owner)}
        at = None
        if blocks is not None and name is None and same.get("owner", context.rank) == context.rank:
            block, at = blocks.allocate(mine.nbytes)
        if block is not None:
            undo.callback(block.close)
            _fill(context, block, mine, fill)
        return same, [mine.shape, at]

    with ExitStack() as undo:
        same, parts = agree(context, call, check)
        rank = same.get("owner")
        kind = np.dtype(dtype)
        ranks = range(context.size) if rank is None else [rank]
        segments = {r: ArrayLayout(tuple(parts[r][0]), kind) for r in ranks}
        places = [parts[r][1] for r in ranks]
        if blocks is not None and None not in places:
            memories: dict[int, Memory] = {} if block is None else {context.rank: block}
            for r, at in zip(ranks, places, strict=True):
                if r != context.rank:
                    memories[r] = blocks.open(at, segments[r].nbytes)
            counters = context.take_counters(call, epoch_counters(context.size))
            undo.pop_all()
            handles = dict.fromkeys(segments, blocks.handle)
            return Window(context, counters, segments, memories, handles, rank)
    mine = Source(segments[context.rank], fill) if context.rank in segments else None
    return make_window(context, call, segments, rank, mine, name=name)


def _fill(context: NodeContext, memory: Memory, layout: ArrayLayout, values: Any) -> None:
    """Store an array, or a scalar in all elements, where there is any."""
    if values is not None and layout.nbytes:
        is_host = isinstance(values, np.ndarray)
        # No name holds the array: it would keep the memory of a call that fails.
        memory.view(layout)[...] = context.backend.xp.asarray(values) if is_host else values


def make_window(
    context: NodeContext,
    call: str,
    segments: Mapping[int, ArrayLayout],
    owner: int | None,
    source: Source | None,
    *,
    name: str | None = None,
    words: int = 0,
    is_part: bool = False,
    readonly: bool = False,
) -> Window:
    """Make a window of the segments of some ranks; `source` is of this one. Collective."""
    lots = [[{0: segments[rank]}] if rank in segments else [] for rank in range(context.size)]
    mine = [] if source is None else [source]
    more: dict[str, Any] = {"words": words, "is_part": is_part, "readonly": readonly}
    (window,) = make_windows(context, call, 1, lots, owner, mine, name=name, **more)
    return window


def make_windows(
    context: NodeContext,
    call: str,
    count: int,
    lots: Sequence[Sequence[Lot]],
    owner: int | None,
    sources: Sequence[Source],
    *,
    name: str | None = None,
    words: int = 0,
    is_part: bool = False,
    readonly: bool = False,
) -> list[Window]:
    """Allocate, share the handles, and map, each on all ranks before any goes on. Collective.

    `lots` has the memories of each rank; `sources` has for each window what becomes this rank's
    segment. A window that `is_part` of another object is closed by that, which may use its counters
    in place of its epochs: then it has so many `words` at least.
    """
    layouts, handles, memories = ([dict[int, Any]() for _ in range(count)] for _ in range(3))
    with undoing(context, call) as undo, ExitStack() as offered:
        shared = _share_memory(context, call, lots, sources, undo, offered)
        for rank, each in enumerate(shared):
            for lot, (handle, memory) in zip(lots[rank], each, strict=True):
                one, parts = _parts(lot, handle, memory)
                for (n, layout), part in zip(lot.items(), parts, strict=True):
                    layouts[n][rank], handles[n][rank], memories[n][rank] = layout, one, part
                    if readonly:
                        part.protect(is_own=rank == context.rank)
        publication: Publication | None = None
        if name is not None:
            publication = context.publish(context, call, name, layouts[0], handles[0])
            undo.callback(publication.discard)
        words = max(words, epoch_counters(context.size))
        counters = [context.take_counters(call, words) for _ in layouts]
    return [
        Window(context, *each, owner, publication, is_part=is_part, readonly=readonly)
        for each in zip(counters, layouts, memories, handles, strict=True)
    ]


def _parts(lot: Lot, handle: str, memory: Memory) -> tuple[str, list[Memory]]:
    """Return the handle of each segment and the memory of each; no one of several has a handle."""
    return (handle, [memory]) if len(lot) == 1 else ("", cut(memory, _spans(lot)))


def _spans(lot: Lot) -> list[tuple[int, int]]:
    """Return the offset and the bytes of each segment; of several each begins a block."""
    sizes = [layout.nbytes for layout in lot.values()]
    if len(sizes) > 1:
        sizes = [*map(rounded, sizes)]
    return [*zip(accumulate(sizes, initial=0), sizes, strict=False)]


def _share_memory(
    context: NodeContext,
    call: str,
    lots: Sequence[Sequence[Lot]],
    sources: Sequence[Source],
    undo: ExitStack,
    offered: ExitStack,
) -> list[list[tuple[str, Memory]]]:
    """Return the handle and the memory of each lot of each rank. Collective.

    Others open memory until the end of `offered`.
    """

    def offer() -> tuple[list[Memory], list[str]]:
        mine = lots[context.rank]
        made = [_make(context, call, lot, sources, undo) for lot in mine]
        if any(each.exported is not None for each in sources):
            context.drain(call)  # the work on any stream is in the arrays now
        elif any(each.values is not None for each in sources):
            context.synchronize(None, call)
        pairs = zip(mine, made, strict=True)
        return made, [_publish(context, *pair, sources, offered) for pair in pairs]

    def open_others() -> tuple[Mapping[int, list[Memory]], None]:
        memories: dict[int, list[Memory]] = defaultdict(list, {context.rank: made})
        for rank in context.agreement.others:
            for packed in handles[rank]:
                memory = _open(context, Handle.unpack(packed), rank)
                undo.callback(memory.close)
                memories[rank].append(memory)
        return memories, None

    step = partial(context.agreement.step_keeping, call)
    made, handles = step(offer)
    meet_in(undo, context, call)
    memories, _ = step(open_others)
    return [[*zip(handles[r], memories[r], strict=True)] for r in range(context.size)]


def _make(
    context: NodeContext, call: str, lot: Lot, sources: Sequence[Source], undo: ExitStack
) -> Memory:
    """Return the memory of a lot: new and filled, or that of an array in place."""
    exported = sources[next(iter(lot))].exported
    if exported is not None:
        return exported.memory
    spans = _spans(lot)
    try:
        memory = context.backend.allocate(sum(spans[-1]))
    except UnsupportedError as error:
        raise UnsupportedError(f"{call} failed: {error}") from error
    undo.callback(memory.close)
    for (n, layout), (begin, _) in zip(lot.items(), spans, strict=True):
        _fill(context, memory, layout._replace(offset=begin), sources[n].values)
    return memory


def _publish(
    context: NodeContext, lot: Lot, memory: Memory, sources: Sequence[Source], offered: ExitStack
) -> str:
    given = sources[next(iter(lot))].exported
    if given is not None:
        return context.handle(given.token, given.offset, memory.nbytes, given.capacity, given.kind)
    token = context.backend.publish(memory)
    offered.callback(context.backend.retract, token)
    return context.handle(token, 0, sum(_spans(lot)[-1]), memory.nbytes)


def _open(context: NodeContext, handle: Handle, rank: int) -> Memory:
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
    return str(value[()]) if value == value else f"{value}, {value.tobytes().hex()}"


def _is_kept(fill: Any, value: np.ndarray[Any, Any]) -> bool:
    """Whether NumPy's cast to `value` changed no more than a float's last digits."""
    if value.dtype.kind in "fcV":
        return True
    # NaT differs from itself.
    return bool(value != value or value.astype(np.asarray(fill).dtype) == fill)

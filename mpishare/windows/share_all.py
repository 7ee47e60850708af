"""Windows of many arrays at once: one agreement for all, and one allocation for all copies."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from mpishare.backends.suballocator import rounded
from mpishare.coordination.agreement import require_same
from mpishare.memory.memory import cut
from mpishare.runtime import ranges
from mpishare.windows.allocate import NewMemory, nbytes_of, owner_rank
from mpishare.windows.epochs import epoch_counters
from mpishare.windows.share import address_of, check_copy, inspect_source, let_go, segment_of
from mpishare.windows.tree import pack, unpack
from mpishare.windows.undo import undoing
from mpishare.windows.window import Window

if TYPE_CHECKING:
    import numpy as np

    from mpishare.coordination.counters import Counters
    from mpishare.memory.memory import Memory
    from mpishare.runtime.context import NodeContext
    from mpishare.windows.allocate import Given
    from mpishare.windows.segment import Segment
    from mpishare.windows.share import Source

log = logging.getLogger("mpishare.window")

_CALL = "Node.share_all"
_ARRAYS = "__array__", "__cuda_array_interface__", "__dlpack__"


def share_all(context: NodeContext, source: Any, owner: Any, copy: Any) -> Any:
    """Make windows of a tree of arrays that one rank has. Collective; see `Node.share_all`."""
    mine = _Leaves(context, copy)

    def inspect() -> dict[str, Any]:
        rank = owner_rank(context, _CALL, owner)
        arguments: dict[str, Any] = {"owner": rank, "copy": check_copy(_CALL, copy)}
        if context.rank == rank:
            tree = source() if callable(source) else source
            arguments["tree"] = pack(tree, mine.add, _CALL, "source")
            arguments |= mine.describe()
        return arguments

    try:
        replies = context.begin(_CALL, inspect)
        same = [{key: reply[key] for key in ("owner", "copy")} for reply in replies]
        require_same(_CALL, same, context.rank)
        rank = replies[0]["owner"]
        windows = _make(context, rank, _leaves_of(replies[rank]), mine.sources)
    except BaseException:
        let_go(mine.sources)
        raise
    return unpack(replies[rank]["tree"], windows)


class _Leaves:
    """The arrays of this rank's tree, each once."""

    def __init__(self, context: NodeContext, copy: bool | None) -> None:
        self._context, self._copy = context, copy
        self._numbers: dict[Any, int] = {}
        self.sources: list[Source] = []

    def add(self, leaf: Any, path: str) -> int:
        """Return the number of an array: one that it has already where it is the same memory."""
        place = f" of {path}"
        if not callable(leaf) and not any(hasattr(leaf, name) for name in _ARRAYS):
            raise TypeError(
                f"{_CALL}{place} failed: {type(leaf).__name__} {str(leaf)[:40]!r} is not an array. "
                "Wrap numbers in numpy.array, and leave out what is not to be shared."
            )
        source = inspect_source(self._context, _CALL, leaf, self._copy, place)
        array = source.array
        key = address_of(array), array.shape, array.strides, array.dtype
        number = self._numbers.get(key) if array.size else None
        if number is None:
            self._numbers[key] = number = len(self.sources)
            self.sources.append(source)
        elif source.exported is not None:
            let_go([source])
        return number

    def describe(self) -> dict[str, Any]:
        """Return the description for the other ranks: each layout once; see `_leaves_of`."""
        numbers: dict[Any, int] = {}
        layouts: list[Any] = []
        leaves = []
        for each in self.sources:
            key = each.segment, each.dtype, each.exported is None
            if key not in numbers:
                numbers[key] = len(layouts)
                layouts.append(each.describe() | {"is_copied": each.exported is None})
            leaves.append(numbers[key])
        return {"layouts": layouts, "leaves": leaves}


class _Leaf(NamedTuple):
    """What all ranks know of an array."""

    segment: Segment
    dtype: np.dtype[Any]
    is_copied: bool

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.segment.shape, self.dtype)


def _leaves_of(reply: dict[str, Any]) -> list[_Leaf]:
    """Return the arrays that the owner described."""
    layouts = [_Leaf(*segment_of(each), each["is_copied"]) for each in reply["layouts"]]
    return [layouts[number] for number in reply["leaves"]]


class _Copies:
    """The arrays that are copied, by their numbers, and where each lies in one new allocation."""

    def __init__(self, leaves: list[_Leaf]) -> None:
        self.numbers = [n for n, leaf in enumerate(leaves) if leaf.is_copied]
        self._leaves = leaves
        sizes = [rounded(leaves[n].nbytes) for n in self.numbers]
        *begins, self.nbytes = accumulate(sizes, initial=0)
        self._spans = list(zip(begins, sizes, strict=True))

    def fill(self, memory: Memory, sources: list[Source], xp: Any) -> None:
        """Copy the owner's arrays into the new memory."""
        whole = memory.array((self.nbytes,), "u1")  # holds the memory's anchor for all arrays
        for n, (begin, _) in zip(self.numbers, self._spans, strict=True):
            segment, dtype, _ = self._leaves[n]
            memory.array(segment.shape, dtype, segment.strides, begin)[...] = xp.asarray(
                sources[n].array
            )
        del whole

    def cut(self, memory: Memory) -> dict[int, Memory]:
        """Return the memory of each copy."""
        return dict(zip(self.numbers, cut(memory, self._spans), strict=True))


def _make(
    context: NodeContext, owner: int, leaves: list[_Leaf], sources: list[Source]
) -> list[Window]:
    """Make the windows: of parts of one new allocation, or of what is shared in place."""
    copies = _Copies(leaves)
    in_place = sorted({*range(len(leaves))} - {*copies.numbers})
    each_nbytes: list[list[int]] = [[] for _ in range(context.size)]
    each_nbytes[owner] = [leaves[n].nbytes for n in in_place]
    given: list[Given] = [each.exported for each in sources if each.exported is not None]
    if copies.numbers:
        each_nbytes[owner].append(copies.nbytes)
        if context.rank == owner:
            given.append(lambda memory: copies.fill(memory, sources, context.backend.xp))
    per_window = epoch_counters(context.size)
    try:
        with ranges.span(_CALL), undoing(context, _CALL) as undo, ExitStack() as published:
            new = NewMemory(context, _CALL, each_nbytes, undo, published)
            packed, _, found_memories = new.share(given)
            counters = [context.take_counters(_CALL, per_window) for _ in leaves]
    finally:
        for source in sources:
            if source.exported is not None:
                source.exported.retract()
    memories = found_memories[owner]
    memory_of = dict(zip(in_place, memories, strict=False))
    if copies.numbers:
        memory_of |= copies.cut(memories[-1])
    handle_of = dict(zip(in_place, packed[owner], strict=False))
    windows = [
        _window(context, owner, counters[n], memory_of[n], leaf, handle_of.get(n, ""))
        for n, leaf in enumerate(leaves)
    ]
    _warn(windows, sources)
    return windows


def _window(
    context: NodeContext,
    owner: int,
    counters: Counters,
    memory: Memory,
    leaf: _Leaf,
    handle: str,
) -> Window:
    segments: list[Segment | None] = [None] * context.size
    memories: list[Memory | None] = [None] * context.size
    handles = [""] * context.size
    segments[owner], memories[owner], handles[owner] = leaf.segment, memory, handle
    number = context.next_number("window")
    return Window(context, number, counters, memories, segments, leaf.dtype, owner, handles=handles)


def _warn(windows: list[Window], sources: list[Source]) -> None:
    why = [(w.name, s.why_copied) for w, s in zip(windows, sources, strict=False) if s.why_copied]
    if why:
        log.warning(
            "%s: %d arrays were copied, not shared in place; %s: %s", _CALL, len(why), *why[0]
        )

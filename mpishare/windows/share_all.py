"""Windows of many arrays at once: one agreement for all, and one allocation for all copies."""

from __future__ import annotations

import logging
from collections import namedtuple
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from mpishare.backends.suballocator import rounded
from mpishare.memory.memory import cut
from mpishare.runtime import ranges
from mpishare.windows.allocate import share_memory
from mpishare.windows.arguments import agree, nbytes_of, owner_of
from mpishare.windows.epochs import epoch_counters
from mpishare.windows.share import (
    address_of,
    check_copy,
    inspect_source,
    let_go,
    segment_of,
    sources,
)
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
    with sources() as mine:

        def inspect() -> tuple[dict[str, Any], list[Any]]:
            rank = owner_of(context, _CALL, owner)
            same = {"owner": rank, "copy": check_copy(_CALL, copy)}
            if context.rank != rank:
                return same, []
            leaves = _Leaves(context, copy, mine)
            packed = pack(source() if callable(source) else source, leaves.add, "source")
            return same, [packed, *leaves.describe()]

        same, replies = agree(context, _CALL, inspect)
        packed, layouts, numbers = replies[same["owner"]]
        found = [_Leaf(*segment_of(each), each["is_copied"]) for each in layouts]
        windows = _make(context, same["owner"], [found[number] for number in numbers], mine)
    return unpack(packed, windows)


class _Leaves:
    """The arrays of this rank's tree, each once."""

    def __init__(self, context: NodeContext, copy: bool | None, sources: list[Source]) -> None:
        self._context, self._copy = context, copy
        self._numbers: dict[Any, int] = {}
        self._sources = sources

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
            self._numbers[key] = number = len(self._sources)
            self._sources.append(source)
        else:
            let_go([source])
        return number

    def describe(self) -> tuple[list[Any], list[int]]:
        """Return the different layouts, for the other ranks, and which of them each array has."""
        layouts: dict[Any, dict[str, Any]] = {}
        keys = [(each.segment, each.dtype, each.exported is None) for each in self._sources]
        for key, each in zip(keys, self._sources, strict=True):
            if key not in layouts:
                layouts[key] = each.describe() | {"is_copied": each.exported is None}
        numbers = {key: number for number, key in enumerate(layouts)}
        return [*layouts.values()], [numbers[key] for key in keys]


class _Leaf(NamedTuple):
    """What all ranks know of an array."""

    segment: Segment
    dtype: np.dtype[Any]
    is_copied: bool

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.segment.shape, self.dtype)


def _make(
    context: NodeContext, owner: int, leaves: list[_Leaf], sources: list[Source]
) -> list[Window]:
    """Make the windows: of parts of one new allocation, or of what is shared in place."""
    copied = [n for n, leaf in enumerate(leaves) if leaf.is_copied]
    in_place = [n for n, leaf in enumerate(leaves) if not leaf.is_copied]
    sizes = [rounded(leaves[n].nbytes) for n in copied]
    *begins, total = accumulate(sizes, initial=0)

    def fill(memory: Memory) -> None:
        whole = memory.array((total,), "u1")  # holds the memory's anchor for all arrays
        for n, begin in zip(copied, begins, strict=True):
            segment, dtype, _ = leaves[n]
            array = memory.array(segment.shape, dtype, segment.strides, begin)
            array[...] = context.backend.xp.asarray(sources[n].array)
        del whole

    given: list[Given] = [each.exported for each in sources if each.exported is not None]
    each_nbytes: list[list[int]] = [[] for _ in range(context.size)]
    each_nbytes[owner] = [leaves[n].nbytes for n in in_place]
    if copied:
        each_nbytes[owner].append(total)
        given += [fill] if context.rank == owner else []
    with ranges.span(_CALL), undoing(context, _CALL) as undo:
        handles, memories = share_memory(context, _CALL, each_nbytes, given, undo)
        per_window = epoch_counters(context.size)
        counters = [context.take_counters(_CALL, per_window) for _ in leaves]
    shared = dict(zip(in_place, zip(memories[owner], handles[owner], strict=True), strict=False))
    if copied:
        parts = cut(memories[owner][-1], list(zip(begins, sizes, strict=True)))
        shared |= {n: (part, "") for n, part in zip(copied, parts, strict=True)}
    windows = [
        _window(context, owner, words, leaf, *shared[n])
        for n, (leaf, words) in enumerate(zip(leaves, counters, strict=True))
    ]
    why = [(w.name, s.why_copied) for w, s in zip(windows, sources, strict=False) if s.why_copied]
    if why:
        log.warning(
            "%s: %d arrays were copied, not shared in place; %s: %s", _CALL, len(why), *why[0]
        )
    return windows


def _window(
    context: NodeContext,
    owner: int,
    counters: Counters,
    leaf: _Leaf,
    memory: Memory,
    handle: str,
) -> Window:
    segments: list[Segment | None] = [None] * context.size
    memories: list[Memory | None] = [None] * context.size
    handles = [""] * context.size
    segments[owner], memories[owner], handles[owner] = leaf.segment, memory, handle
    number = context.next_number("window")
    return Window(context, number, counters, memories, segments, leaf.dtype, owner, handles=handles)


# --- trees of arrays, as text that travels to other ranks


def pack(
    tree: Any, add_leaf: Callable[[Any, str], int], path: str, around: tuple[int, ...] = ()
) -> Any:
    """Return a tree as JSON can hold it: a number for a leaf, or a list that begins with a kind.

    `add_leaf` numbers a leaf, which is at a path. `around` has the identities of the dicts, lists
    and tuples that the tree lies in.
    """
    if id(tree) in around:
        raise TypeError(f"{_CALL} failed: {path} is a {type(tree).__name__} that contains itself")
    around = *around, id(tree)

    def packed(tree: Any, place: str) -> Any:
        return pack(tree, add_leaf, f"{path}{place}", around)

    if isinstance(tree, Mapping):
        for key in tree:
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise TypeError(
                    f"{_CALL} failed: {path} has the key {key!r}, which is neither a str nor an int"
                )
        # Pairs, since keys of JSON's own objects are texts.
        return ["dict", *([key, packed(tree[key], f"[{key!r}]")] for key in tree)]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        names = [*tree._fields]
        items = [packed(getattr(tree, name), f".{name}") for name in names]
        return ["named", type(tree).__name__, names, *items]
    if isinstance(tree, list | tuple):
        items = [packed(each, f"[{at}]") for at, each in enumerate(tree)]
        return ["tuple" if isinstance(tree, tuple) else "list", *items]
    return add_leaf(tree, path)


def unpack(packed: Any, leaves: list[Any]) -> Any:
    """Return the tree with these leaves, by their numbers."""
    if isinstance(packed, int):
        return leaves[packed]
    kind, *items = packed
    if kind == "dict":
        return {key: unpack(item, leaves) for key, item in items}
    if kind == "named":
        name, fields, *items = items
        # Without `rename` it refuses its own names of renamed fields, such as _0.
        return namedtuple(name, fields, rename=True)(*(unpack(item, leaves) for item in items))
    found = [unpack(item, leaves) for item in items]
    return tuple(found) if kind == "tuple" else found

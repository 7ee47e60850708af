"""Windows of many arrays at once: one agreement for all, and one allocation for all copies."""

from __future__ import annotations

import logging
from collections import namedtuple
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from mpishare.memory.arguments import require_bool
from mpishare.memory.memory import ArrayLayout
from mpishare.windows.allocate import make_windows
from mpishare.windows.arguments import agree, owner_of
from mpishare.windows.share import address_of, check_copy, inspect_source
from mpishare.windows.undo import undoing

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mpishare.runtime.context import NodeContext
    from mpishare.windows.allocate import Lot, Source

log = logging.getLogger("mpishare.window")

_CALL = "Node.share_all"
_ARRAYS = "__array__", "__cuda_array_interface__", "__dlpack__"


def share_all(context: NodeContext, source: Any, owner: Any, copy: Any, readonly: Any) -> Any:
    """Make windows of a tree of arrays that one rank has. Collective; see `Node.share_all`."""
    mine: list[Source] = []
    with undoing(context, _CALL) as undo, ExitStack() as offered:

        def inspect() -> tuple[dict[str, Any], list[Any]]:
            rank = owner_of(context, _CALL, owner)
            same = {
                "owner": rank,
                "copy": check_copy(_CALL, copy),
                "readonly": require_bool(f"{_CALL} failed: ", "readonly", readonly),
            }
            if context.rank != rank:
                return same, []
            inspect_leaf = partial(inspect_source, context, _CALL, copy=copy, readonly=readonly)
            inspect_leaf = partial(inspect_leaf, undo=undo, offered=offered)
            leaves = _Leaves(inspect_leaf, mine)
            packed = pack(source() if callable(source) else source, leaves.add, "source")
            return same, [packed, *leaves.describe()]

        same, replies = agree(context, _CALL, inspect)
        rank = same["owner"]
        packed, layouts, numbers = replies[rank]
        found = [(ArrayLayout.unpack(layout), is_copied) for layout, is_copied in layouts]
        leaves = [*enumerate(found[number] for number in numbers)]
        # One memory for each array in place, and one for all copies.
        copies = {n: layout for n, (layout, is_copied) in leaves if is_copied}
        in_place = [{n: layout} for n, (layout, is_copied) in leaves if not is_copied]
        lots: list[Sequence[Lot]] = [()] * context.size
        lots[rank] = [*in_place, copies] if copies else in_place
        count = len(numbers)
        windows = make_windows(context, _CALL, count, lots, rank, mine, readonly=bool(readonly))
    why = [(w.name, s.why_copied) for w, s in zip(windows, mine, strict=False) if s.why_copied]
    if why:
        text = "%s: %d arrays were copied, not shared in place; %s: %s"
        log.warning(text, _CALL, len(why), *why[0])
    return unpack(packed, windows)


class _Leaves:
    """The arrays of this rank's tree, each once."""

    def __init__(self, inspect: Callable[..., Source], sources: list[Source]) -> None:
        self._inspect = inspect
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
        source = self._inspect(leaf, place=place)
        array = source.values
        key = address_of(array), array.shape, array.strides, array.dtype
        number = self._numbers.get(key) if array.size else None
        if number is None:
            self._numbers[key] = number = len(self._sources)
            self._sources.append(source)
        elif source.exported is not None:
            source.exported.memory.close()
        return number

    def describe(self) -> tuple[list[Any], list[int]]:
        """Return the different layouts, for the other ranks, and which of them each array has."""
        leaves = [(each.layout, each.exported is None) for each in self._sources]
        numbers = {leaf: number for number, leaf in enumerate(dict.fromkeys(leaves))}
        layouts = [[layout.pack(), is_copied] for layout, is_copied in numbers]
        return layouts, [numbers[leaf] for leaf in leaves]


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

    def items(places: Iterable[tuple[str, Any]]) -> list[Any]:
        return [pack(each, add_leaf, path + at, (*around, id(tree))) for at, each in places]

    if isinstance(tree, Mapping):
        for key in tree:
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise TypeError(
                    f"{_CALL} failed: {path} has the key {key!r}, which is neither a str nor an int"
                )
        # Pairs, since keys of JSON's own objects are texts.
        found = items((f"[{key!r}]", each) for key, each in tree.items())
        return ["dict", *zip(tree, found, strict=True)]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        found = items((f".{name}", getattr(tree, name)) for name in tree._fields)
        return ["named", type(tree).__name__, [*tree._fields], *found]
    if isinstance(tree, list | tuple):
        kind = "tuple" if isinstance(tree, tuple) else "list"
        return [kind, *items(zip(map("[{}]".format, range(len(tree))), tree, strict=True))]
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

"""Trees of arrays: dicts, lists and tuples within each other, as text that travels to other ranks.

A packed tree is what JSON can hold: a number for a leaf, or a list that begins with a kind.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any


def pack(
    tree: Any,
    add_leaf: Callable[[Any, str], int],
    call: str,
    path: str,
    around: tuple[int, ...] = (),
) -> Any:
    """Return the packed form of a tree; `add_leaf` numbers a leaf, which is at a path.

    `around` has the identities of the dicts, lists and tuples that the tree lies in.
    """
    if id(tree) in around:
        raise TypeError(f"{call} failed: {path} is a {type(tree).__name__} that contains itself")
    around = *around, id(tree)
    if isinstance(tree, Mapping):
        for key in tree:
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise TypeError(
                    f"{call} failed: {path} has the key {key!r}, which is neither a str nor an int"
                )
        # Pairs, since keys of JSON's own objects are texts.
        return [
            "dict",
            *([key, pack(tree[key], add_leaf, call, f"{path}[{key!r}]", around)] for key in tree),
        ]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        names = [*tree._fields]
        items = [
            pack(getattr(tree, name), add_leaf, call, f"{path}.{name}", around) for name in names
        ]
        return ["named", type(tree).__name__, names, *items]
    if isinstance(tree, list | tuple):
        items = [
            pack(each, add_leaf, call, f"{path}[{at}]", around) for at, each in enumerate(tree)
        ]
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

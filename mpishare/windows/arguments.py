"""Arguments of the calls that make shared objects: checked, and the same on all ranks."""

from __future__ import annotations

import operator
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.coordination.agreement import require_same
from mpishare.errors import UnsupportedError, format_nbytes, shortened
from mpishare.memory.arguments import is_int, shape_of
from mpishare.memory.memory import ArrayLayout
from mpishare.memory.numbers import number_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.runtime.context import NodeContext

_NAME = re.compile(r"[A-Za-z0-9._-]{1,40}")
_MOST = (1 << 62) - 1  # bytes, or of anything else, that can be addressed


def agree(
    context: NodeContext, call: str, check: Callable[[], tuple[dict[str, Any], Any]]
) -> tuple[dict[str, Any], list[Any]]:
    """Begin a call by a check of its arguments on every rank. Collective, host-blocking.

    `check` returns the arguments that must be the same on all ranks, and this rank's own part.
    Returns the common arguments, and the parts of all ranks.
    """
    replies = context.begin(call, check)
    require_same(call, [same for same, _ in replies], context.rank)
    return replies[0][0], [own for _, own in replies]


def owner_of(context: NodeContext, call: str, owner: Any) -> int:
    """Return the rank that the user gave as the owner, by default the leader."""
    return 0 if owner is None else context.rank_of(call, owner)


def receivers(
    context: NodeContext, call: str, source: int, given: Any, roles: tuple[str, str]
) -> list[int]:
    """Return the ranks that wait for one rank, in order: those given, else all others."""
    if given is None:
        return [rank for rank in range(context.size) if rank != source]
    sender, name = roles
    if not hasattr(given, "__iter__"):
        raise TypeError(
            f"{call} failed: {name} must be a list of ranks, not {given!r}. Give {name}=[{given!r}]"
        )
    ranks = sorted(context.rank_of(call, rank) for rank in given)
    if source in ranks or len(set(ranks)) != len(ranks):
        raise ValueError(f"{call} failed: {name} {ranks} name the {sender}, or a rank twice")
    return ranks


def count_of(call: str, name: str, value: Any, most: int = _MOST) -> int:
    """Return an int from 1 to `most` that the user gave."""
    if not is_int(value):
        raise TypeError(f"{call} failed: {name} must be an int, not {value!r}")
    if not 1 <= value <= most:
        wanted = "at least 1" if value < 1 and most == _MOST else f"from 1 to {most}"
        raise ValueError(f"{call} failed: {name} must be {wanted}, not {value}")
    return operator.index(value)


def check_layout(context: NodeContext, call: str, shape: Any, dtype: Any) -> ArrayLayout:
    """Return shape and dtype in canonical form, or raise why they cannot be used."""
    try:
        sizes = shape_of(shape)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{call} failed: {error}") from None
    try:
        found = np.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"{call} failed: {error}") from None
    if found.hasobject:
        raise TypeError(
            f"{call} failed: dtype {found} holds Python objects, which cannot be shared. Give one "
            "of numbers or bytes"
        )
    if context.backend.name == "cuda" and (found.isbuiltin != 1 or number_of(found) is None):
        raise UnsupportedError(
            f"{call} failed: CuPy has no dtype {found}. Share its bytes: dtype='u1'."
        )
    layout = ArrayLayout(sizes, found)
    if layout.nbytes >= 1 << 62:
        raise ValueError(
            f"{call} failed: shape {sizes} of {found} needs {format_nbytes(layout.nbytes)}, more "
            "than can be addressed"
        )
    return layout


def check_name(call: str, name: Any) -> str | None:
    """Return the name of a window, or raise the reason why it is not allowed."""
    if name is None:
        return None
    if not isinstance(name, str):
        raise TypeError(f"{call} failed: name must be a str, not {shortened(name)}")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{call} failed: {shortened(name)} is not a name: 1 to 40 letters, digits, '.', '_' or "
            "'-'"
        )
    return name

"""Which ranks of other nodes a rank sends its node's result to, and of what each has its share."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from mpishare.errors import grouped

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


def nodes_of(names: Sequence[Hashable]) -> list[list[int]]:
    """Return the ranks of each node, in the order of their lowest ranks."""
    return [*grouped((name, rank) for rank, name in enumerate(names)).values()]


def partners(ours: Sequence[int], theirs: Sequence[int], rank: int) -> tuple[int, list[int]]:
    """Return which rank of another node sends its result to one of ours, and whom that serves.

    That of the same place within its node, modulo the number of ranks there.
    """
    source = theirs[ours.index(rank) % len(theirs)]
    served = [each for place, each in enumerate(theirs) if ours[place % len(ours)] == rank]
    return source, served


def shares_of(count: int, size: int) -> list[slice]:
    """Return the share of so many elements that each rank folds."""
    ends = [count * at // size for at in range(size + 1)]
    return [slice(*each) for each in pairwise(ends)]

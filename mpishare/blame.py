"""Follow who waits for whom: to those that wait for nobody, or back to where one began."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishare.control import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.control import ControlBlock, Status


def culprits(block: ControlBlock, awaited: Sequence[int]) -> tuple[int, ...]:
    """Return for want of whom this rank waits in vain. Local.

    Whoever it awaits may itself wait for another, or have given up for want of it: only that other
    one is missing.
    """
    found = set()
    path, seen = list(awaited), {block.rank}
    while path:
        rank = path.pop()
        if rank in seen:
            continue
        seen.add(rank)
        # First what it waits in: a rank that gives up says so before it says that it waits no more.
        status = block.status(rank)
        if status is not None:
            path.extend(status.awaited)
        elif block.state(rank) == State.LEFT and (without := block.departure(rank)[1]):
            path.extend(without)
        else:
            found.add(rank)
    return tuple(sorted(found)) or tuple(awaited)


def circle(block: ControlBlock, awaited: Sequence[int]) -> dict[int, Status]:
    """Return what the ranks wait in on the way back to this rank; empty if none leads there.

    Local.
    """
    seen: dict[int, Status] = {}
    path = list(awaited)
    is_closed = False
    while path:
        rank = path.pop()
        if rank == block.rank:
            is_closed = True
        elif rank not in seen:
            status = block.status(rank)
            if status is not None:
                seen[rank] = status
                path.extend(status.awaited)
    return seen if is_closed else {}

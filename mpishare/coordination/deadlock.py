"""Follow who waits for whom: to those that wait for nobody, or back to where one began."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from mpishare.coordination.control_block import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.coordination.control_block import ControlBlock, Status

_RUNS_S = 0.5
"""A rank that waits looks again and again; one that has not for so long is stopped."""

_WORDS_S = 1.0
"""How long a rank that waits elsewhere is given to say why it gives up."""


def root_causes(block: ControlBlock, awaited: Sequence[int]) -> tuple[int, ...]:
    """Return for want of whom this rank waits in vain. Local.

    Whoever it awaits may itself wait for another, or have given up for want of it: only that other
    one is missing. Not if it waits for ranks of another node, which have no number here.
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
        if status is not None and status.awaited and _runs(block, rank, status):
            path.extend(status.awaited)
        elif block.state(rank) == State.LEFT and (without := block.departure(rank)[1]):
            path.extend(without)
        else:
            found.add(rank)
    return tuple(sorted(found)) or tuple(awaited)


def given_up(block: ControlBlock, ranks: Sequence[int]) -> list[int]:
    """Return which ranks have left by an error, which says better why nobody comes. Local.

    Who waits for ranks of another node began at about the time of this rank, and is given a moment.
    """
    until = time.monotonic() + _WORDS_S
    while time.monotonic() < until:
        said = map(block.status, ranks)
        if all(status is None or status.awaited for status in said):
            break
        os.sched_yield()
    return [rank for rank in ranks if block.state(rank) == State.LEFT]


def _runs(block: ControlBlock, rank: int, status: Status) -> bool:
    """Whether a rank still looks, or has gone on from where it waited. Local."""
    until = time.monotonic() + _RUNS_S
    while time.monotonic() < until:
        now = block.status(rank)
        if now is None or (now.version, now.looks) != (status.version, status.looks):
            return True
        os.sched_yield()
    return False


def find_cycle(block: ControlBlock, awaited: Sequence[int]) -> dict[int, Status]:
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

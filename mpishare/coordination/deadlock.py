"""The wait-for graph of a node: root causes of a timeout, and cycles of waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishare.coordination.control_block import State
from mpishare.coordination.poll import poll

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from mpishare.coordination.control_block import ControlBlock, Status

# Calls that wait for another call than their own, by the last word of their name.
_AWAITED = {
    "put": "A put waits until its consumers have taken earlier frames, or have closed the channel.",
    "get": "A get waits for the producer's next put, or its end().",
    "start": "A window's start waits for post on its targets: post first.",
    "wait": "A window's wait waits for complete on its origins, an event's for record.",
}

# A cycle of waits must stand still for this long before it is called a deadlock.
_STILL_NS = 500_000_000

# The time that a rank waiting elsewhere is given to publish why it leaves.
_REASON_S = 1.0


def root_causes(block: ControlBlock, awaited: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks at the end of the chains of waits that begin with `awaited`.

    An awaited rank may itself wait for another, or have left because another is missing: only that
    other one is a cause. Returns `awaited` where the chains end at ranks of other nodes, which have
    no number here.
    """
    found = set()
    path, seen = list(awaited), {block.rank}
    while path:
        rank = path.pop()
        if rank in seen:
            continue
        seen.add(rank)
        # The wait is read first: a rank that leaves publishes that before it ends its wait.
        status = block.status(rank)
        if status is not None and status.awaited:
            path.extend(status.awaited)
        elif (left := block.departure(rank)) and left.missing:
            path.extend(left.missing)
        else:
            found.add(rank)
    return tuple(sorted(found)) or tuple(awaited)


def awaited_calls(calls: Collection[str]) -> list[str]:
    """Return, for an error, what those of these calls wait for that are not collective."""
    words = {call.rpartition(": ")[2] for call in calls}
    return [text for word, text in _AWAITED.items() if word in words]


def left_meanwhile(block: ControlBlock, ranks: Sequence[int]) -> list[int]:
    """Return which of these ranks left by an error, whose text explains more than a timeout can.

    A rank that waits for another node began at about the time of this one, so it gets a moment.
    """

    def has_reason() -> bool:
        return all(each is None or each.awaited for each in map(block.status, ranks))

    poll(has_reason, _REASON_S)
    return [rank for rank in ranks if block.state(rank) == State.LEFT]


def find_cycle(block: ControlBlock, awaited: Sequence[int]) -> dict[int, Status]:
    """Return the ranks on the way from `awaited` back to this rank, with each one's wait.

    Empty where no chain of waits leads back.
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


def stands_still(block: ControlBlock, cycle: Mapping[int, Status]) -> bool:
    """Whether each rank has looked in vain when all waits of a cycle had been there for a while.

    A rank that was merely stopped has not looked since then, and may go on with its next look.
    """
    waits = [*cycle.values(), *filter(None, [block.status(block.rank)])]
    since_ns = max(status.begun_ns for status in waits) + _STILL_NS
    return all(status.looked_ns > since_ns for status in waits)

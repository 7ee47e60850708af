"""Which counters a fence writes and waits for, round by round."""

from __future__ import annotations

from mpishare.control import LINE


def row(size: int) -> int:
    """Return the counters of one rank towards every other, in whole slots."""
    return -(-size // LINE) * LINE


def rounds(rank: int, size: int, flat_ranks: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """Return the rounds of a fence: the slot to write, then the slots to wait for, with ranks.

    Flat: one round, everybody's slot. Else dissemination (Hensgen, Finkel, Manber 1988): in round k
    rank r tells r + 2^k and hears from r - 2^k, so that after log2(size) rounds each has heard, by
    way of others, from all.
    """
    if size <= flat_ranks:
        others = [(LINE * other, other) for other in range(size) if other != rank]
        return [(LINE * rank, others)]
    found = []
    step, number = 1, 0
    while step < size:
        source = (rank - step) % size
        found.append((LINE * rank + number, [(LINE * source + number, source)]))
        step, number = 2 * step, number + 1
    return found

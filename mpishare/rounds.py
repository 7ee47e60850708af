"""Where the counters of a window stand, and which ones a fence writes and waits for."""

from __future__ import annotations

from mpishare.counters import LINE


def words(size: int) -> int:
    """Return how many counters a window of a node of `size` ranks has."""
    return size * (LINE + 2 * _row(size))


def ready(writer: int, reader: int, size: int) -> int:
    """Return the place of the counter by which a target tells an origin that it has posted."""
    return LINE * size + _row(size) * writer + reader


def done(writer: int, reader: int, size: int) -> int:
    """Return the place of the counter by which an origin tells a target that it has completed."""
    return (LINE + _row(size)) * size + _row(size) * writer + reader


def _row(size: int) -> int:
    # What one rank writes stands in slots of its own.
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

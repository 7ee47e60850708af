"""Where packed cells lie between two ranks of a node: one decision, the same at both ends.

Pure integers: every rank works it out for every rank, from what all were told.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mpishare.halo.message import padded
from mpishare.halo.tables import are_words, chunks

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

_FLAG_NBYTES = 32
_SLAB_ALIGN = 128

Key = tuple[int, int, int]
"""A part of a message to some rank: its sender, the message's tag, the field."""


@dataclass
class Slab:
    """What one rank receives in its own GPU memory.

    Attributes
    ----------
    flags : dict of (sender, tag, field) to list of int, bytes
        Where the flags of the items of a fused part are, unless it travels as words. A sender
        without parts has one flag, at (sender, -1, -1).
    fused, copied : dict of (sender, tag, field) to int, bytes
        Where the packed cells or words are; of fused ones the first of two copies.
    turn : int, bytes
        From the first copy to the second.
    nbytes : int, bytes
        Of the whole; the flags come first.
    """

    flags: dict[Key, list[int]] = field(default_factory=dict)
    fused: dict[Key, int] = field(default_factory=dict)
    copied: dict[Key, int] = field(default_factory=dict)
    flags_nbytes: int = 0
    turn: int = 0
    nbytes: int = 0


def slab_of(
    told: Sequence[Any],
    routes: Sequence[dict[int, str]],
    units: Mapping[tuple[int, int, int, int], int],
    team: Iterable[int],
    rank: int,
    crowded: Container[int] = (),
) -> Slab:
    """Return how the slab of a rank is laid out.

    Parameters
    ----------
    told : sequence
        For each rank of the plan, `Message.as_data` of what it sends, and the route.
    routes : sequence of dict of int to str
        For each rank, its route to each peer.
    units : mapping of (sender, receiver, tag, field) to int, bytes
        For each fused part what both of its ends can move at once.
    team : iterable of int
        The ranks of the node.
    crowded : container of int
        Those that share a GPU.
    """
    slab = Slab()
    incoming = [
        ((sender, tag, number), nbytes, route)
        for sender in team
        for peer, tag, parts, route in told[sender]
        if peer == rank
        for number, nbytes, _ in parts
    ]
    words = {
        (sender, tag, number)
        for (sender, tag, number), nbytes, route in incoming
        if route == "fused" and are_words(nbytes, units[sender, rank, tag, number])
    }
    flags = 0
    for key, nbytes, route in incoming:
        if route == "fused" and key not in words:
            is_crowded = rank in crowded or key[0] in crowded
            count = len(list(chunks(nbytes, is_crowded=is_crowded)))
            slab.flags[key] = [_FLAG_NBYTES * (flags + index) for index in range(count)]
            flags += count
    heard = {sender for (sender, _, _), _, route in incoming if route == "fused"}
    for sender in team:
        if routes[rank].get(sender) == "fused" and sender not in heard:
            slab.flags[sender, -1, -1] = [_FLAG_NBYTES * flags]
            flags += 1
    at = slab.flags_nbytes = -(-_FLAG_NBYTES * flags // _SLAB_ALIGN) * _SLAB_ALIGN
    begin = at
    for key, nbytes, route in incoming:
        if route == "fused":
            slab.fused[key] = at
            at += padded(2 * nbytes if key in words else nbytes)
    slab.turn = -(-(at - begin) // _SLAB_ALIGN) * _SLAB_ALIGN
    at = begin + 2 * slab.turn
    for key, nbytes, route in incoming:
        if route == "copy":
            slab.copied[key] = at
            at += padded(nbytes)
    slab.nbytes = at
    return slab


def pinned_of(told: Sequence[Any], team: Iterable[int]) -> tuple[dict[tuple[int, Key], int], int]:
    """Return where packed cells lie in host memory, by receiver and part, and the bytes of all."""
    found: dict[tuple[int, Key], int] = {}
    at = 0
    for sender in team:
        for peer, tag, parts, route in told[sender]:
            for number, nbytes, _ in parts if route == "pinned" else ():
                found[peer, (sender, tag, number)] = at
                at += padded(nbytes)
    return found, at

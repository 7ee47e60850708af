"""The order in which the blocks of a large reduction take their work items. Pure integers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

SEND, REDUCE, RECV = range(3)
_KIND_SHIFT, _PEER_SHIFT = 30, 20


def schedule(rank: int, nranks: int, chunks: int, lead: int, lag: int) -> np.ndarray[Any, Any]:
    """Return the items of a rank, in 32 bits each, for large.cu.

    At time t all ranks send chunk t to each other, reduce chunk t - `lead`, and receive the reduced
    chunk t - `lead` - `lag`. In the order of time and kind each item therefore stands behind all
    items that it waits for, on all ranks. `chunks` are those in the slice of a rank.
    """
    items = sorted(_items(rank, nranks, chunks, lead, lag))
    packed = [
        kind << _KIND_SHIFT | peer << _PEER_SHIFT | chunk for _, kind, _, peer, chunk in items
    ]
    return np.array(packed, np.uint32)


def _items(
    rank: int, nranks: int, chunks: int, lead: int, lag: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (time, kind, index within these, peer, chunk)."""
    for chunk in range(chunks):
        yield chunk + lead, REDUCE, 0, rank, chunk
        for step in range(1, nranks):
            # Each rank begins with another peer, so that no link is crowded.
            peer = (rank + step) % nranks
            yield chunk, SEND, step, peer, chunk
            yield chunk + lead + lag, RECV, step, peer, chunk

"""The order in which the blocks of a large reduction take their work items. Pure integers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

SEND, REDUCE, RECV = range(3)
_KIND_SHIFT, _PEER_SHIFT = 30, 20


def schedule(rank: int, nranks: int, chunks: int, lag: int) -> np.ndarray[Any, Any]:
    """Return the items of a rank, in 32 bits each, for large.cu.

    First all ranks send all chunks to each other: they fill the links while the folds find their
    chunks there. Then, at time t, they reduce chunk t, and receive the reduced chunk t - `lag`. So
    each item stands behind all items that it waits for, on all ranks. `chunks` are those in the
    slice of a rank.
    """
    items = _items(rank, nranks, chunks, lag)
    packed = [kind << _KIND_SHIFT | peer << _PEER_SHIFT | chunk for kind, peer, chunk in items]
    return np.array(packed, np.uint32)


def _items(rank: int, nranks: int, chunks: int, lag: int) -> Iterator[tuple[int, int, int]]:
    """Yield (kind, peer, chunk)."""
    # Each rank begins with another peer, so that no link is crowded.
    peers = [(rank + step) % nranks for step in range(1, nranks)]
    for chunk in range(chunks):
        yield from ((SEND, peer, chunk) for peer in peers)
    for time in range(chunks + lag):
        if time < chunks:
            yield REDUCE, rank, time
        if time >= lag:
            yield from ((RECV, peer, time - lag) for peer in peers)

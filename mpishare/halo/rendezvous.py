"""Owners of ghosts by global ids, found in two rounds of messages.

Ranks ask the home of an id for its owner, then the owner for the place. The home is a rank given by
a hash of the id, so that no rank holds the ids of all.
"""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.memory.arguments import is_int

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.plans.comm import PlanComm

    Array = np.ndarray[Any, Any]
    Places = dict[int, Array]

_MOST_NAMED = 3
"""Wrong ids of each rank that an error names."""

NO_OWNER = -1
"""The owner of an id that no rank owns."""


class Ids:
    """The global ids of this rank's places, checked and sorted: owned ones and ghosts.

    `owned_places` and `ghost_places` are the places of the sorted ids.
    """

    def __init__(self, ids: Any, n_owned: Any, extent: int) -> None:
        found = np.asarray(ids.get() if hasattr(ids, "get") else ids)
        if found.size == 0:
            found = found.astype(np.int64)
        if found.ndim != 1 or found.dtype.kind not in "iu":
            raise TypeError(
                f"ids must be ints along one axis, not of dtype {found.dtype} and shape "
                f"{found.shape}"
            )
        if len(found) != extent:
            raise ValueError(
                f"there are {len(found)} ids, the fields have {extent} places along the axis: "
                "give one id for each place"
            )
        if not is_int(n_owned):
            raise TypeError(f"n_owned must be an int, not {n_owned!r}")
        if not 0 <= n_owned <= extent:
            raise ValueError(f"n_owned is {n_owned}, and there are {extent} ids: 0 to {extent}")
        top = np.iinfo(np.int64).max
        if found.dtype == np.uint64 and found.max(initial=0) > top:
            raise ValueError(f"ids has {found.max()}: ids are at most {top}")
        found = found.astype(np.int64)  # a copy, which the user cannot change
        owned, ghosts = np.split(found, [index(n_owned)])
        # Sorted: a search for sorted ids is ten times as fast.
        self.owned_places, self.ghost_places = np.argsort(owned), np.argsort(ghosts)
        self.owned, self.ghosts = owned[self.owned_places], ghosts[self.ghost_places]
        self.ghost_places += len(owned)
        self._require_owned_once()

    def _require_owned_once(self) -> None:
        twice = np.flatnonzero(self.owned[1:] == self.owned[:-1])
        if len(twice):
            first, second = sorted(self.owned_places[twice[0] : twice[0] + 2])
            raise ValueError(
                f"ids names id {self.owned[twice[0]]} twice among the {len(self.owned)} that this "
                f"rank owns, at places {first} and {second}"
            )


class Directory:
    """Owners by id, for all ids with their home on this rank, given rank by rank."""

    def __init__(self, ids: Array, counts: Array) -> None:
        order = np.argsort(ids, kind="stable")  # fast, since those of a rank are sorted
        self._ids = ids[order]
        self._owners = np.repeat(np.arange(len(counts)), counts)[order]

    def owned_twice(self) -> list[list[int]]:
        at = np.flatnonzero(self._ids[1:] == self._ids[:-1])
        rows = zip(self._ids[at], self._owners[at], self._owners[at + 1], strict=True)
        return [[int(each) for each in row] for row in rows]

    def owners_of(self, ids: Array) -> Array:
        if not len(self._ids):
            return np.full(len(ids), NO_OWNER)
        at = np.searchsorted(self._ids, ids)
        at[at == len(self._ids)] = 0
        return np.where(self._ids[at] == ids, self._owners[at], NO_OWNER)


def homes_of(ids: Array, size: int) -> Array:
    """Return the home of each id: ranks get about as many ids each."""
    bits = ids.view(np.uint64)
    mixed = (bits ^ (bits >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
    # Few bits are sorted fast.
    return ((mixed >> np.uint64(33)) % np.uint64(size)).astype(np.min_scalar_type(size))


def find_places(comm: PlanComm, call: str, ids: Ids) -> tuple[Places, Places]:
    """Return the places to send from and to receive to, by rank. Collective, host-blocking.

    Between two ranks they are in the order of the ids. `ValueError` on all ranks if two ranks own
    an id, or none owns a ghost's.
    """
    size = comm.size
    owned_order, owned_counts = _grouped(homes_of(ids.owned, size), size)
    order, counts = _grouped(homes_of(ids.ghosts, size), size)
    owned = comm.alltoallv(call, lambda: (ids.owned[owned_order], owned_counts))
    asked, asked_counts = comm.alltoallv(call, lambda: (ids.ghosts[order], counts))
    directory = Directory(*owned)
    found, _ = comm.alltoallv(call, lambda: (directory.owners_of(asked), asked_counts))
    owners = np.empty_like(found)
    owners[order] = found
    twice, orphans = directory.owned_twice(), ids.ghosts[owners == NO_OWNER]
    few = twice[:_MOST_NAMED], orphans[:_MOST_NAMED].tolist()
    require_owners(call, comm.step(call, lambda: [len(twice), few[0], len(orphans), few[1]]))
    order, counts = _grouped(owners.astype(np.min_scalar_type(size)), size)
    asked, asked_counts = comm.alltoallv(call, lambda: (ids.ghosts[order], counts))
    places = ids.owned_places[np.searchsorted(ids.owned, asked)]
    return _by_rank(places, asked_counts), _by_rank(ids.ghost_places[order], counts)


def require_owners(call: str, found: Sequence[Any]) -> None:
    """Raise the same `ValueError` on every rank unless each id has one owner."""
    n_twice, n_orphans = (sum(each[at] for each in found) for at in (0, 2))
    if n_twice:
        named = [f"id {i} by ranks {a} and {b}" for each in found for i, a, b in each[1]]
        raise ValueError(
            f"{call} failed: two ranks own the same id: {_listed(named, n_twice)}. Each id is "
            "owned by one rank; on the others it is a ghost"
        )
    if n_orphans:
        named = [f"id {i}, a ghost of rank {r}" for r, each in enumerate(found) for i in each[3]]
        raise ValueError(
            f"{call} failed: nobody owns {_listed(named, n_orphans)}. An id is owned by the rank "
            "that has it among its first n_owned ids"
        )


def _listed(named: Sequence[str], count: int) -> str:
    shown = named[: 2 * _MOST_NAMED]
    more = f", and {count - len(shown)} more" if count > len(shown) else ""
    return "; ".join(shown) + more


def _grouped(ranks: Array, size: int) -> tuple[Array, Array]:
    """Return the order by rank, and the count of each rank."""
    return np.argsort(ranks, kind="stable"), np.bincount(ranks, minlength=size)


def _by_rank(places: Array, counts: Array) -> Places:
    parts = np.split(places, np.cumsum(counts)[:-1])
    return {rank: part for rank, part in enumerate(parts) if len(part)}

"""What the ranks agree on: the columns of a row, and the keys by which each names its peers."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpishare.memory.arguments import is_int, items_of, shape_of
from mpishare.plans.message import Message, padded

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from mpi4py import MPI

_MOST_NBYTES = 1 << 30  # of a slot with `room` rows
_LINE = 64  # bytes; each column of a slot begins at a multiple of it


class Column(NamedTuple):
    """What one row has of a column."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, given: Any) -> Column:
        """Return the column that a user describes: a dtype, or a dtype and a shape."""
        dtype = np.dtype(given)
        found = cls(dtype.base, dtype.shape)
        if dtype.hasobject:
            raise TypeError(f"a column of {dtype} holds Python objects, which cannot travel")
        if not found.nbytes:
            raise ValueError(f"a column of {dtype} has rows without bytes")
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" if self.shape else str(self.dtype)


class Key(NamedTuple):
    """One peer of this rank."""

    name: Any  # as users write it: a rank, or a side of the grid
    rank: int
    place: int  # of this rank among the peer's own keys
    tag: int  # of what is sent; `far_tag` of what comes
    far_tag: int


class Form(NamedTuple):
    """The agreed form of a plan."""

    columns: tuple[Column, ...]
    room: int
    keys: tuple[Key, ...]  # of this rank, in order
    nkeys: list[int]  # of each rank

    @property
    def places(self) -> dict[Any, int]:
        """The place of each key, by its name."""
        return {key.name: at for at, key in enumerate(self.keys)}

    def offsets(self, capacity: int) -> list[int]:
        """Return where each column begins in a slot for so many rows, and the bytes of all."""
        sizes = (padded(capacity * column.nbytes, _LINE) for column in self.columns)
        return [*accumulate(sizes, initial=0)]

    def first_keys(self, ranks: Collection[int]) -> tuple[dict[int, int], int]:
        """Return the number of the first key of each of some ranks, and how many keys they have."""
        *found, count = accumulate((self.nkeys[rank] for rank in ranks), initial=0)
        return dict(zip(ranks, found, strict=True)), count

    def messages(self) -> tuple[list[Message], list[Message]]:
        """Return what is sent and received, as the agreement on routes takes it."""
        sends = [Message(key.rank, key.tag, ()) for key in self.keys]
        return sends, [Message(key.rank, key.far_tag, ()) for key in self.keys]


def columns_of(given: Any) -> tuple[Column, ...]:
    """Return the columns that a user describes."""
    each = items_of(given)
    if isinstance(given, str) or not each:
        raise TypeError(f"columns must be dtypes, at least one in a list, not {given!r}")
    return tuple(map(Column.of, each))


def room_of(given: Any, columns: Sequence[Column]) -> int:
    """Return the rows of a slot."""
    most = _MOST_NBYTES // sum(column.nbytes for column in columns)
    if not is_int(given) or not 1 <= given <= most:
        raise ValueError(
            f"room must be an int from 1 to {most}, which is 1 GiB for each peer, not {given!r}. "
            "More rows take larger slots"
        )
    return index(given)


def names_of(comm: MPI.Intracomm, peers: Any, dims: Any, periods: Any) -> list[list[Any]]:
    """Return this rank's keys in order, each with the rank that it leads to."""
    if dims is None:
        if periods is not None:
            raise TypeError("periods= is for dims=, which is missing")
        ranks = range(comm.size) if peers is None else items_of(peers)
        if ranks is None or not all(is_int(each) and 0 <= each < comm.size for each in ranks):
            raise ValueError(f"peers must be ranks from 0 to {comm.size - 1}, not {peers!r}")
        return [[rank, rank] for rank in sorted({*map(index, ranks)})]
    if peers is not None:
        raise TypeError("peers= and dims= are both given: peers are named by one of them")
    return _sides(comm, dims, periods)


def _sides(comm: MPI.Intracomm, dims: Any, periods: Any) -> list[list[Any]]:
    """Return the sides of this rank's block; rank r is at ``numpy.unravel_index(r, dims)``."""
    from mpi4py import MPI

    try:
        extents = MPI.Compute_dims(comm.size, [*shape_of(dims)])
    except MPI.Exception:
        extents = []
    if prod(extents) != comm.size or not extents:
        raise ValueError(f"dims={dims!r} do not fit {comm.size} ranks")
    given = items_of(periods) or [bool(periods)] * len(extents)
    if len(given) != len(extents):
        raise ValueError(f"periods={periods!r} is for {len(given)} of {len(extents)} axes")
    at, found = np.unravel_index(comm.rank, extents), []
    for axis, wraps in enumerate(given):
        for side in (-1, 1):
            place = [int(each) for each in at]
            place[axis] += side
            if wraps or 0 <= place[axis] < extents[axis]:
                rank = np.ravel_multi_index(place, extents, mode="wrap")
                found.append([[axis, side], int(rank)])
    return found


def keys_of(names: Sequence[Sequence[Any]], me: int) -> tuple[Key, ...]:
    """Return my keys, given those of all ranks; raise on all if two do not name each other."""
    places = [{(_hashed(name), peer): at for at, (name, peer) in enumerate(mine)} for mine in names]
    for rank, mine in enumerate(names):
        for name, peer in mine:
            far = _far(name, rank)
            if (far, rank) not in places[peer]:
                where = "" if is_int(far) else f" at {far}"
                raise ValueError(
                    f"rank {rank} has peer {peer}, which does not have rank {rank}{where}"
                )
    return tuple(
        Key(_hashed(name), peer, places[peer][_far(name, me), me], _tag(_far(name, me)), _tag(name))
        for name, peer in names[me]
    )


def _hashed(name: Any) -> Any:
    return name if is_int(name) else tuple(name)


def _far(name: Any, me: int) -> Any:
    """Return by which key the peer names me: my low side is its high side."""
    return me if is_int(name) else (name[0], -name[1])


def _tag(name: Any) -> int:
    return 0 if is_int(name) else 2 * name[0] + (name[1] > 0)

"""The exchange between irregular neighbors: any cells along one axis, to and from any ranks."""

from __future__ import annotations

import reprlib
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.halo.message import Message, Part
from mpishare.halo.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mpi4py import MPI

    from mpishare.halo.engine import PlanSetup
    from mpishare.halo.layout import Layout
    from mpishare.node import Node


class NeighborExchange(Plan):
    """The exchange of named cells between any ranks, as an unstructured mesh needs it.

    Collective over `comm`, host-blocking. Make it once, use it at every step.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Over any number of nodes.
    sends : dict of int to int array
        For each rank that gets something of mine, the places along `axis`, in this order. A place
        may be named many times.
    recvs : dict of int to int array
        For each rank that I get something from, where it goes along `axis`: the k-th of my places
        gets what the k-th place of its ``sends`` for me has. No place is named twice, and none is
        in ``sends``.
    fields : array, or list or tuple of arrays
        As for `HaloExchange`, of any shape, with the same extent along `axis`.
    axis : int
        The axis of the fields along which cells are counted; the others travel whole.
    node : Node, optional
        Of which the ranks of `comm` on this node are a part. Default: one that is kept on `comm`
        while there are plans on it.
    require : str or sequence of str, optional
        The routes that are allowed. Default: all.

    Raises
    ------
    ValueError
        On all ranks, if what one sends is not what the other expects.
    PeerError
        If another rank's arguments are wrong.
    """

    _call = "NeighborExchange"

    def __init__(
        self,
        comm: MPI.Intracomm,
        sends: Mapping[int, Any],
        recvs: Mapping[int, Any],
        fields: Any,
        *,
        axis: int = 0,
        node: Node | None = None,
        require: Any = None,
    ) -> None:
        from mpi4py import MPI

        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise TypeError(f"NeighborExchange failed: comm must be an Intracomm, not {comm!r}")
        self._size = comm.size
        self._cells: list[dict[int, np.ndarray[Any, Any]]] = []
        self._field_axes: list[int] = []
        arguments = {"sends": sends, "recvs": recvs, "axis": axis}
        super().__init__(comm, fields, node, require, arguments)

    def _describe(self, layouts: Sequence[Layout], arguments: dict[str, Any]) -> dict[str, Any]:
        axis = arguments["axis"]
        if isinstance(axis, bool) or not hasattr(axis, "__index__"):
            raise TypeError(f"axis must be an int, not {axis!r}")
        axis = index(axis)
        extents = set()
        for number, field in enumerate(layouts):
            ndim = len(field.shape)
            if not -ndim <= axis < ndim:
                raise ValueError(f"axis {axis} is none of field {number}'s {ndim}")
            self._field_axes.append(axis % ndim)
            extents.add(field.shape[axis])
        if len(extents) > 1:
            raise ValueError(f"fields have different extents along axis {axis}: {sorted(extents)}")
        (extent,) = extents
        sends = _checked("sends", arguments["sends"], self._size, extent)
        recvs = _checked("recvs", arguments["recvs"], self._size, extent)
        named = np.concatenate([*recvs.values(), np.empty(0, np.int64)])
        if len(np.unique(named)) != len(named):
            values, counts = np.unique(named, return_counts=True)
            raise ValueError(f"recvs names place {values[counts > 1][0]} twice")
        both = np.intersect1d(named, np.concatenate([*sends.values(), np.empty(0, np.int64)]))
        if len(both):
            raise ValueError(f"place {both[0]} is sent and received: it must be one or the other")
        self._cells = [sends, recvs]
        rest = [
            [extent for at, extent in enumerate(field.shape) if at != where]
            for field, where in zip(layouts, self._field_axes, strict=True)
        ]
        told = [[[rank, len(cells[rank])] for rank in cells] for cells in self._cells]
        return {"same": {"axis": self._field_axes, "other axes": rest}, "counts": told}

    def _messages(self, setup: PlanSetup) -> tuple[list[Message], list[Message]]:
        _require_counts(self._call, [each["counts"] for each in setup.described])

        def messages(cells: dict[int, np.ndarray[Any, Any]]) -> list[Message]:
            found = []
            for peer, places in sorted(cells.items()):
                parts = [
                    Part.of_indices(field, each, axis, places)
                    for field, (each, axis) in enumerate(
                        zip(setup.mine, self._field_axes, strict=True)
                    )
                ]
                kept = tuple(part for part in parts if part.nbytes)
                if kept:
                    found.append(Message(peer, 0, kept))
            return found

        return messages(self._cells[0]), messages(self._cells[1])


def _require_counts(call: str, told: Sequence[Any]) -> None:
    """Raise the same `ValueError` on every rank unless all that is sent is expected. Local."""
    sent = {(rank, to): n for rank, (sends, _) in enumerate(told) for to, n in sends if n}
    expected = {(of, rank): n for rank, (_, recvs) in enumerate(told) for of, n in recvs if n}
    for pair in sorted({*sent, *expected}):
        ours, theirs = sent.get(pair, 0), expected.get(pair, 0)
        if ours != theirs:
            raise ValueError(
                f"{call} failed: rank {pair[0]} sends {ours} places to rank {pair[1]}, which "
                f"expects {theirs}"
            )


def _checked(name: str, given: Any, size: int, extent: int) -> dict[int, np.ndarray[Any, Any]]:
    found = {}
    try:
        items = list(given.items())
    except AttributeError:
        raise TypeError(f"{name} must be a dict of rank to places, not {given!r}") from None
    for rank, places in items:
        if isinstance(rank, bool) or not hasattr(rank, "__index__") or not 0 <= rank < size:
            raise ValueError(f"{name} names rank {rank!r}: ranks are 0 to {size - 1}")
        array = np.asarray(places.get() if hasattr(places, "get") else places)
        if array.size == 0:
            array = array.astype(np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise TypeError(f"{name}[{rank}] must be a list of ints, not {reprlib.repr(places)}")
        wrong = array[(array < 0) | (array >= extent)]
        if len(wrong):
            raise ValueError(
                f"{name}[{rank}] names place {wrong[0]}: the fields have {extent} along the axis"
            )
        # A copy: what the user does to theirs afterwards changes nothing here.
        found[index(rank)] = np.array(array, dtype=np.int64)
    return found

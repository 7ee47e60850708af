"""The exchange between irregular neighbors: any cells along one axis, to and from any ranks."""

from __future__ import annotations

import reprlib
from functools import cache
from operator import index
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from mpishare.halo.plan import Plan
from mpishare.halo.rendezvous import Ids, find_places
from mpishare.memory.arguments import is_int
from mpishare.plans.message import Part, gather_messages
from mpishare.plans.setup import Description, agree_on_fields, plan_setup
from mpishare.plans.wire import require_wire

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mpi4py import MPI
    from numpy.typing import ArrayLike

    from mpishare.memory.types import BackendName, Fields, RouteName, WireName
    from mpishare.node import Node
    from mpishare.plans.engine import PlanSetup
    from mpishare.plans.fields import GivenFields
    from mpishare.plans.layout import FieldLayout
    from mpishare.plans.message import Message

    Places = dict[int, np.ndarray[Any, Any]]

_CALL = "NeighborExchange"


class NeighborExchange(Plan):
    """The exchange of named cells between any ranks, as an unstructured mesh needs it.

    Collective over `comm`, host-blocking. Make it once, use it at every step.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Over any number of nodes.
    sends : dict of int to places
        For each rank that receives from this one, the places along `axis`: ints, in this order; a
        bool for each place; or a slice. A place may be named many times.
    recvs : dict of int to places
        For each rank that sends to this one, the places along `axis`: the k-th place receives
        the k-th place of its ``sends`` for this rank. No place is named twice, and none is in
        ``sends``.
    fields : array or Layout, or list or tuple of them
        As for `HaloExchange`, of any shape, with the same extent along `axis`. ``Layout.any(n)``
        is for any fields with `n` places along it.
    axis : int
        The axis of the fields along which cells are counted; the others travel whole.
    node, backend, require, wire
        As for `HaloExchange`.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if `sends` of one rank and `recvs` of another do not match, or if an argument
        is wrong.
    PeerError
        If another rank's arguments are wrong.
    ClosedError
        If the node is closed.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        sends: Mapping[int, ArrayLike | slice],
        recvs: Mapping[int, ArrayLike | slice],
        fields: Fields,
        *,
        axis: int = 0,
        node: Node | None = None,
        backend: Literal["auto"] | BackendName = "auto",
        require: RouteName | Sequence[RouteName] | None = None,
        wire: WireName | None = None,
    ) -> None:
        def describe(found: GivenFields) -> Description:
            same, extent = _axes_of(found, axis, wire)
            places = (
                _checked("sends", sends, comm.size, extent),
                _checked("recvs", recvs, comm.size, extent),
            )
            _require_distinct(*places)
            counts = [[[rank, len(each[rank])] for rank in each] for each in places]
            return Description({"made of": "sends, recvs", **same}, counts, places)

        with plan_setup(_CALL, comm, node, backend=backend) as start:
            agreed = agree_on_fields(start, fields, require, describe)
            _require_counts(agreed.geometry)
            super().__init__(agreed, _PlaceCells(agreed.setup, agreed.kept, axis, wire))

    @classmethod
    def from_global_ids(
        cls,
        comm: MPI.Intracomm,
        ids: ArrayLike,
        n_owned: int,
        fields: Fields,
        *,
        axis: int = 0,
        node: Node | None = None,
        backend: Literal["auto"] | BackendName = "auto",
        require: RouteName | Sequence[RouteName] | None = None,
        wire: WireName | None = None,
    ) -> Self:
        """Make the exchange that brings to each ghost the cell with its global id.

        Collective over `comm`, host-blocking. Owners are found by messages; no rank holds the ids
        of all.

        Parameters
        ----------
        comm : mpi4py.MPI.Intracomm
            Over any number of nodes.
        ids : array of int
            The global id of each of this rank's places along `axis`: those of the cells that it
            owns, then those of its ghosts. Any ints of 64 bits. A ghost may be there twice, and
            may be a copy of this rank's own cell.
        n_owned : int
            The number of cells that this rank owns.
        fields, axis, node, backend, require, wire
            As for `NeighborExchange`.

        Raises
        ------
        ValueError
            On all ranks, if two ranks own the same id, or no rank owns a ghost's. On this rank, if
            `ids` has another length than the fields, or names an owned id twice.
        PeerError
            If another rank's arguments are wrong.

        Examples
        --------
        A ring: each rank owns two cells, and has a ghost of the next rank's first.

        >>> from mpi4py import MPI
        >>> comm = MPI.COMM_WORLD
        >>> ids = numpy.array([0, 1, 2]) + 2 * comm.rank
        >>> ids[2] %= 2 * comm.size
        >>> u = numpy.array([ids[0], ids[1], -1.0])
        >>> with NeighborExchange.from_global_ids(comm, ids, 2, u) as ex:
        ...     ex.exchange(u)
        >>> bool(u[2] == ids[2])
        True
        """

        def describe(found: GivenFields) -> Description:
            same, extent = _axes_of(found, axis, wire)
            kept = Ids(ids, n_owned, extent)
            return Description({"made of": "global ids", **same}, kept=kept)

        made = cls.__new__(cls)
        with plan_setup(_CALL, comm, node, backend=backend) as start:
            agreed = agree_on_fields(start, fields, require, describe)
            places = find_places(agreed.setup.comm, _CALL, agreed.kept)
            Plan.__init__(made, agreed, _PlaceCells(agreed.setup, places, axis, wire))
        return made

    def _describe(self) -> str:
        sent, ghosts = (
            sum(each.parts[0].shape[each.parts[0].axis or 0] for each in messages)
            for messages in (self._setup.my_sends, self._setup.my_recvs)
        )
        axis = self._setup.same["axis"][0]
        return f"sent={sent}, ghosts={ghosts}, axis={axis}, {super()._describe()}"


class _PlaceCells:
    """The cells at places of fields, to send and to receive, as `Plan` takes them."""

    def __init__(self, setup: PlanSetup, places: Sequence[Places], axis: Any, wire: Any) -> None:
        self._places, self._axis, self._wire = places, axis, wire
        self._extent = setup.mine[0].shape[setup.same["axis"][0]]

    def describe(self, found: GivenFields) -> Description:
        same, extent = _axes_of(found, self._axis, self._wire)
        if extent != self._extent:
            raise ValueError(
                f"field 0 has {extent} places along axis {self._axis}, the plan was made for "
                f"{self._extent}"
            )
        return Description(same)

    def messages(self, setup: PlanSetup) -> tuple[list[Message], list[Message]]:
        """Return a message with cells of all fields for each peer; empty ones are left out."""
        return self._messages(setup, self._places[0]), self._messages(setup, self._places[1])

    def _messages(self, setup: PlanSetup, places: Places) -> list[Message]:
        axes = dict(zip(setup.mine, setup.same["axis"], strict=True))

        @cache
        def part(layout: FieldLayout, peer: int) -> Part:
            return Part.of_indices(0, layout, axes[layout], places[peer])

        return gather_messages(
            (0, peer, part(layout, peer).of_field(field))
            for peer in places
            for field, layout in enumerate(setup.mine)
        )


def _axes_of(given: GivenFields, axis: Any, wire: Any) -> tuple[dict[str, Any], int]:
    """Return what is the same on all ranks, and the extent along the axis.

    The former are each field's axis, the extents of its others, and the wire.
    """
    if given.takes_any:
        axis = 0
        if len(given.layouts[0].shape) != 1:
            raise ValueError(
                "a Layout without dtype has one axis here, that of the places: not shape "
                f"{given.layouts[0].shape}"
            )
    if not is_int(axis):
        raise TypeError(f"axis must be an int, not {axis!r}")
    axis = index(axis)
    axes, other_axes, extents = [], [], set()
    for number, field in enumerate(given.layouts):
        ndim = len(field.shape)
        if not -ndim <= axis < ndim:
            raise ValueError(f"axis {axis} is not one of the {ndim} axes of field {number}")
        axes.append(axis % ndim)
        other_axes.append([n for at, n in enumerate(field.shape) if at != axis % ndim])
        extents.add(field.shape[axis])
    if len(extents) > 1:
        raise ValueError(f"fields have different extents along axis {axis}: {sorted(extents)}")
    same = {"axis": axes, "other axes": other_axes, "wire": require_wire(wire, given)}
    return same, extents.pop()


def _require_distinct(sends: Places, recvs: Places) -> None:
    """Raise `ValueError` if a place is received twice, or sent and received."""
    received = np.concatenate([*recvs.values(), np.empty(0, np.int64)])
    values, counts = np.unique(received, return_counts=True)
    if len(values) != len(received):
        raise ValueError(f"recvs names place {values[counts > 1][0]} twice")
    both = np.intersect1d(received, np.concatenate([*sends.values(), np.empty(0, np.int64)]))
    if len(both):
        raise ValueError(
            f"place {both[0]} is in sends and in recvs: a place may be in one of them only"
        )


def _require_counts(counts: Sequence[Any]) -> None:
    """Raise the same `ValueError` on every rank if two ranks disagree on their number of cells."""
    sent = {(rank, to): n for rank, (sends, _) in enumerate(counts) for to, n in sends if n}
    expected = {(of, rank): n for rank, (_, recvs) in enumerate(counts) for of, n in recvs if n}
    for pair in sorted({*sent, *expected}):
        ours, theirs = sent.get(pair, 0), expected.get(pair, 0)
        if ours != theirs:
            raise ValueError(
                f"{_CALL} failed: rank {pair[0]} sends {ours} places to rank {pair[1]}, which "
                f"expects {theirs}: sends[{pair[1]}] of rank {pair[0]} and recvs[{pair[0]}] of "
                f"rank {pair[1]} must name as many"
            )


def _checked(name: str, given: Any, size: int, extent: int) -> Places:
    """Return the user's places along the axis, by rank, as valid indices."""
    found = {}
    try:
        items = list(given.items())
    except AttributeError:
        raise TypeError(f"{name} must be a dict of rank to places, not {given!r}") from None
    for rank, places in items:
        if not is_int(rank) or not 0 <= rank < size:
            raise ValueError(f"{name} names rank {rank!r}: ranks are 0 to {size - 1}")
        array = _as_indices(f"{name}[{rank}]", places, extent)
        wrong = array[(array < 0) | (array >= extent)]
        if len(wrong):
            raise ValueError(
                f"{name}[{rank}] names place {wrong[0]}: the fields have {extent} along the axis"
            )
        # A copy: the user may change theirs afterwards.
        found[index(rank)] = np.array(array, dtype=np.int64)
    return found


def _as_indices(name: str, places: Any, extent: int) -> np.ndarray[Any, Any]:
    """Return places as indices, from ints, a mask or a slice."""
    if isinstance(places, slice):
        return np.arange(extent)[places]
    array = np.asarray(places.get() if hasattr(places, "get") else places)
    if array.size == 0 and array.dtype.kind != "b":
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise TypeError(
            f"{name} must be ints, a mask of bools or a slice, not {reprlib.repr(places)}"
        )
    if array.dtype.kind != "b":
        return array
    if len(array) != extent:
        raise ValueError(
            f"{name} is a mask of {len(array)} places: the fields have {extent} along the axis"
        )
    return np.flatnonzero(array)

"""`SeamExchange`: any box of any field onto any other, as a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING, Any, Literal

from mpishare.halo.plan import Plan
from mpishare.halo.seam import pack_seam
from mpishare.halo.seam_geometry import find_reads, messages_of
from mpishare.memory.arguments import is_int, items_of
from mpishare.plans.exchange.pair import engine_class
from mpishare.plans.fields import GivenFields
from mpishare.plans.layout import is_on_gpu
from mpishare.plans.rings import Shifts
from mpishare.plans.setup import Description, agree_on_found, agree_on_routes, plan_setup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi4py import MPI

    from mpishare.halo.seam import Seam
    from mpishare.memory.types import Array, BackendName, Fields, RouteName, Stream
    from mpishare.node import Node
    from mpishare.plans.setup import PlanStart

    Shift = Mapping[str, Any]

_CALL = "SeamExchange"


class SeamExchange(Plan):
    """The exchange over seams: boxes of fields that are boxes of other fields, turned and scaled.

    For faces of a cubed sphere, folds, many blocks a rank, and boxes that are sheared, twisted or
    antiperiodic. Collective over `comm`, host-blocking. Each rank lists the seams into its own
    fields; senders learn of them here.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Over any number of nodes.
    fields : array or Layout, or list or tuple of them
        The blocks, or components, of this rank: as many and as large as it has, perhaps none, from
        any allocator. Both fields of a seam have one dtype and as many axes.
    seams : sequence of Seam
        The cells of this rank's fields that come from elsewhere. Each cell is written by one seam
        at most, and none that a seam writes is read by another: no order of seams can be seen.
    node, backend, require
        As for `HaloExchange`. By default the memory is that of the first array of any rank.

    Attributes
    ----------
    shifts : tuple of str
        The names of shifts, which each call has to give.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if seams write the same cells, or write and read them; if a box, a field or a
        rank is not there, or shapes or dtypes differ. On the rank that lists it, if a seam is wrong
        by itself. The message names the seams.
    PeerError
        If another rank's arguments are wrong.
    UnsupportedError
        If `require` refuses a route.

    Examples
    --------
    The ghost of one block is the first cell of the other, which runs the other way:

    >>> from mpi4py import MPI
    >>> u = numpy.array([1.0, 2.0, 0.0])
    >>> v = numpy.array([3.0, 4.0, 0.0])
    >>> seam = Seam(into=(0, numpy.s_[2:]), source=(0, 1, numpy.s_[:1]), scale=-1.0)
    >>> with SeamExchange(MPI.COMM_SELF, [u, v], [seam]) as plan:
    ...     plan.exchange(u, v)
    >>> u
    array([ 1.,  2., -3.])
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        fields: Fields,
        seams: Sequence[Seam],
        *,
        node: Node | None = None,
        backend: Literal["auto"] | BackendName = "auto",
        require: RouteName | Sequence[RouteName] | None = None,
    ) -> None:
        with plan_setup(_CALL, comm, node, backend=backend) as start:
            memory = _memory_of_all(start, fields)
            rank = start.comm.rank
            agreed = agree_on_found(start, require, lambda: _describe(fields, memory, seams, rank))
            setup, found = agreed.setup, agreed.geometry
            reads = find_reads(
                [each["seams"] for each in found], setup.layouts, [each["dtypes"] for each in found]
            )
            names = {read.seam.shift for read in reads if read.seam.shift is not None}
            self.shifts: tuple[str, ...] = tuple(sorted(names))
            self._shifts = Shifts(len(names))
            self._has_offsets = any(read.seam.factors[1] for read in reads)
            numbers = {name: number for number, name in enumerate(self.shifts)}
            messages = messages_of(reads, setup.comm.rank, setup.layouts, numbers)
            routed = agree_on_routes(setup, agreed.arrays, *messages, engine_class)
            self._open_pair(replace(routed, shifts=self._shifts))

    def exchange(
        self, *fields: Array, shift: Shift | None = None, stream: Stream | None = None
    ) -> None:
        """Bring the cells of all seams: `start`, then `wait`.

        Collective over the plan's ranks, as `HaloExchange.exchange`; a rank without fields gives
        none.

        Parameters
        ----------
        *fields : arrays
            As many as this rank made the plan for, each of the layout that it had then.
        shift : mapping of str to int, or to a GPU scalar
            What is added to the start of the rings, by the names of their shifts, in cells: the
            same on all ranks. A scalar of int32 or int64 in GPU memory is read on the stream, so
            that a captured step follows it.
        stream : stream, optional
            As `HaloExchange.exchange`.

        Raises
        ------
        TypeError, ValueError
            If fields are not those of the plan, or shifts are missing or too many. Nothing was sent
            then.
        EpochError, PeerError, PeerTimeout, ClosedError
            As `HaloExchange.exchange`.
        """
        if shift is not None or self.shifts:
            self._take("exchange", shift)
        # As `Plan.exchange`, which would take a third of a small exchange once more.
        if self._open is not None or self._is_closed or not fields:
            self._refuse("exchange")
        try:
            self._forward.exchange(fields, stream)
        except BaseException as error:
            self._fail("exchange", error)

    def start(
        self, *fields: Array, shift: Shift | None = None, stream: Stream | None = None
    ) -> None:
        """Begin an exchange: others get the cells as the stream has left them.

        Collective over the plan's ranks. Until `wait`, write no cell that a seam reads or writes,
        and read none that it writes. Parameters and errors as `exchange`.
        """
        self._take("start", shift)
        super().start(*fields, stream=stream)

    def accumulate(
        self,
        *fields: Array,
        shift: Shift | None = None,
        give_back: bool = False,
        stream: Stream | None = None,
    ) -> None:
        """Do the adjoint: add what is written to what is read, then set it to zero.

        ``theirs[box] += conj(scale) * mine[into]``, turned back, then ``mine[into] = 0``. Offsets
        have no part in it, shifts are those given. Sources may overlap: a cell gets its sums in the
        order of the readers' ranks, of their lists, and of the cells along a ring. Collective; the
        first call allocates, host-blocking. `give_back` as `HaloExchange.accumulate`: seams then
        bring the sums, scaled and with their offsets. Other parameters and errors as `exchange`.

        Raises
        ------
        TypeError
            If a field's elements are no numbers.
        """
        self._take("accumulate", shift)
        super().accumulate(*fields, give_back=give_back, stream=stream)

    def _take(self, call: str, shift: Shift | None) -> None:
        """Take the shifts of a call, or raise before anything is done."""
        if shift is None and not self.shifts:
            return
        self._check_free(call)
        given = {} if shift is None else shift
        if not isinstance(given, Mapping):
            raise TypeError(
                f"{self.name}: {call} failed: shift= must be a dict of numbers, not {shift!r}"
            )
        if {*given} != {*self.shifts}:
            raise ValueError(
                f"{self.name}: {call} failed: shift= names {sorted(map(str, given))}, and the "
                f"seams of all ranks {[*self.shifts]}"
            )
        self._shifts.set([self._shift_of(call, name, given[name]) for name in self.shifts])

    def _shift_of(self, call: str, name: str, value: Any) -> Any:
        if self._setup.on_gpu and is_on_gpu(value):
            from mpishare.plans.gpu.fields import scalar_of

            return scalar_of(value, f"{self.name}: {call} failed: shift[{name!r}]")
        if not is_int(value) or not -(1 << 62) < index(value) < 1 << 62:
            raise TypeError(
                f"{self.name}: {call} failed: shift[{name!r}] must be an int"
                f"{', or a scalar in GPU memory' if self._setup.on_gpu else ''}, not {value!r}"
            )
        return index(value)


def _memory_of_all(start: PlanStart, fields: Any) -> Any:
    """Return the ``backend=`` of the fields of all ranks; a rank may have no fields."""

    def find() -> tuple[None, str]:
        given = GivenFields.of(fields, start.backend) if _has_any(fields) else None
        return None, start.backend if given is None else given.backend

    _, found = start.comm.step_keeping(start.call, find)
    return next((each for each in found if each != "auto"), "auto")


def _has_any(fields: Any) -> bool:
    return not isinstance(fields, list | tuple) or bool(fields)


def _describe(fields: Any, memory: str, seams: Any, rank: int) -> tuple[GivenFields, Description]:
    """Return a rank's fields, and what all ranks learn of its seams."""
    given = GivenFields([], [], memory, takes_any=False)
    if _has_any(fields):
        given = GivenFields.of(fields, memory)
    if given.takes_any:
        raise ValueError("a Layout without dtype has no cells: give one of each field")
    listed = items_of(seams)
    if listed is None:
        raise TypeError(f"seams must be a list of Seam, not {seams!r}")
    packed = []
    for number, seam in enumerate(listed):
        try:
            packed.append(pack_seam(seam, given.layouts))
        except (TypeError, ValueError) as error:
            raise type(error)(f"seam {number} of rank {rank}: {error}") from None
    geometry = {"seams": packed, "dtypes": [str(each.dtype) for each in given.layouts]}
    return given, Description({"made of": "seams", "dtypes": "of each rank"}, geometry)

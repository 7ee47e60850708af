"""The exchange of rows in numbers that only their sender knows."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from mpishare.coordination import recording
from mpishare.errors import EpochError
from mpishare.plans.base_plan import RoutedPlan
from mpishare.plans.fields import GivenFields, require_backend
from mpishare.plans.layout import array_of
from mpishare.plans.setup import Description, agree_on_found, agree_on_routes, plan_setup
from mpishare.rows.calls import require_peers
from mpishare.rows.form import Form, columns_of, keys_of, names_of, room_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mpi4py import MPI

    from mpishare.memory.types import AnyArray, Array, BackendName, RouteName, Stream
    from mpishare.node import Node
    from mpishare.plans.engine import PlanSetup, RoutedSetup
    from mpishare.rows.cuda import CudaRows
    from mpishare.rows.host import HostRows

    RowEngine: TypeAlias = HostRows | CudaRows

_CALL = "RowExchange"


class RowExchange(RoutedPlan):
    """An exchange of rows of some columns: other rows at each call, in any number.

    Collective over `comm`, host-blocking. Make it once, use it at every step: particles that change
    their rank, ghosts of particles, rays, agents. How many rows a peer sends travels beside them:
    no rank waits on the host for a number. All ranks make the same calls, with rows or without.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks, of any number of nodes.
    columns : sequence of dtype, or of (dtype, shape)
        What a row has: ``["f8"] * 7 + ["u8"]``, ``[("f4", (3,)), "i8"]``. Records too. On GPUs a
        row has at most 64 words of up to 16 bytes.
    room : int
        Rows of one peer that memory is held for at first, the same on all ranks. More rows take
        larger slots, which the two ranks make between themselves; on GPUs from one of the next
        calls on, until when they come in rounds.
    peers : sequence of int, optional
        The ranks with which this one exchanges rows, itself perhaps; they name it too. Default:
        all.
    dims : sequence of int, optional
        Instead of `peers`: the grid of ranks, as for `HaloExchange`. A key is a side then,
        ``(axis, -1)`` or ``(axis, 1)``; walls have none.
    periods : bool, or one bool for each axis, optional
        With `dims`: which axes wrap. Default: none.
    node, backend, require
        As for `HaloExchange`. By default the memory is that of the node.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, or two ranks do not name each other.
    UnsupportedError
        On GPUs without MPS on a shared GPU, and for very long rows.
    PeerError
        If another rank's arguments are wrong; `MismatchError` if they differ where they must not.

    Examples
    --------
    Each rank sends two of its rows to the next one of a ring:

    >>> from mpi4py import MPI
    >>> comm = MPI.COMM_WORLD
    >>> x = numpy.arange(3.0) + 10 * comm.rank
    >>> grid = {"dims": (comm.size,), "periods": True, "backend": "host"}
    >>> with RowExchange(comm, ["f8"], **grid) as swap:
    ...     swap.start([x], {(0, 1): (1, 3)})
    ...     n = swap.counts()
    ...     swap.wait()
    ...     came = swap.received((0, -1))[0] - 10 * ((comm.rank - 1) % comm.size)
    >>> n[0, -1], came
    (2, array([1., 2.]))
    """

    _log = logging.getLogger("mpishare.rows")
    _noun = "an exchange of rows"
    _ranges = "start", "wait"

    def __init__(
        self,
        comm: MPI.Intracomm,
        columns: Sequence[Any],
        room: int = 4096,
        *,
        peers: Sequence[int] | None = None,
        dims: Sequence[int] | None = None,
        periods: bool | Sequence[bool] | None = None,
        node: Node | None = None,
        backend: Literal["auto"] | BackendName = "auto",
        require: RouteName | Sequence[RouteName] | None = None,
    ) -> None:
        def find() -> tuple[GivenFields, Description]:
            require_backend(backend)
            kinds = columns_of(columns)
            rows = room_of(room, kinds)
            names = names_of(comm, peers, dims, periods)
            same = {"columns": [*map(str, kinds)], "room": rows}
            given = GivenFields([], [], backend, takes_any=False)
            return given, Description(same, names, (kinds, rows))

        with plan_setup(_CALL, comm, node, backend=backend) as start:
            agreed = agree_on_found(start, require, find)
            keys = keys_of(agreed.geometry, agreed.setup.comm.rank)
            kinds, rows = agreed.kept
            self._form = form = Form(kinds, rows, keys, [*map(len, agreed.geometry)])
            setup: RoutedSetup = agree_on_routes(
                agreed.setup, [], *form.messages(), _classes, is_staged=True
            )
            engine, self._migrates = _classes(setup)
            self._engine: RowEngine = engine(setup, form)
            self._place_of = form.places
            self._migration: Any = None
            self._open_on_routes(setup)

    @property
    def peers(self) -> tuple[Any, ...]:
        """The keys in order: ranks upwards, or sides axis by axis, the low one first. Local."""
        return tuple(key.name for key in self._form.keys)

    def start(
        self, columns: Sequence[Array], rows: Mapping[Any, Any], stream: Stream | None = None
    ) -> None:
        """Send rows of the columns, which are not written until `wait`.

        Collective over the plan's ranks, stream-ordered on CUDA.

        Parameters
        ----------
        columns : sequence of arrays
            Those of the plan, contiguous in C order, all with as many rows.
        rows : dict
            For each peer the rows that go there: ``(low, high)``; an array of row numbers, int32 or
            int64; or ``(numbers, n)``, of which the first n count. `low`, `high` and `n` are ints,
            or int32 or int64 scalars in the memory of the columns. They are copied, so they may
            overlap. A peer that is left out gets none. Numbers and scalars are not written until
            `wait`, either.
        stream : stream, optional
            The stream that writes the columns. Default: the current one of their library.

        Raises
        ------
        TypeError, ValueError
            If columns or rows are not right; nothing was sent then.
        EpochError
            If an exchange is open.
        UnsupportedError
            If the stream is captured, and MPI takes rows to other nodes.
        """
        try:
            columns = [*columns]
            if self._open is None and self._engine.again("start", (columns, rows), stream):
                self._open = columns
                return
            self._check_free("start")
            self._engine.start([*map(array_of, columns)], rows, stream)
        except BaseException as error:
            self._fail("start", error)
        self._open = columns
        if recording.UNDER_WAY:
            self._end_with_capture()

    def wait(  # type: ignore[override]
        self,
        into: Mapping[Any, Sequence[Array]] | Sequence[Array] | None = None,
        stream: Stream | None = None,
        *,
        at: Literal["append"] | None = None,
        count: Any = None,
    ) -> Any:
        """End what `start` began: the rows of all peers have come.

        Collective over the plan's ranks. Stream-ordered on CUDA; host-blocking on hosts, and with
        peers on other nodes unless it is captured.

        Parameters
        ----------
        into : dict, or sequence of arrays with `at`
            For each peer arrays with at least as many rows as come; the first ones are written.
            Rows of peers that are left out stay where they are, for `received`; on GPUs call
            `counts` before if they may be more than `room`.
        stream : stream, optional
            As in `start`.
        at : "append", optional
            All rows go behind `count` in the arrays, in the order of `peers`.
        count : int, or array of int64 of shape ()
            With `at`. An array is updated.

        Returns
        -------
        array of int64 of shape ()
            With `at`, the new count: the given array, or a new one.

        Raises
        ------
        CapacityError
            On the host, if arrays are too short: nothing is written, and `wait` may be called
            again. On GPUs rows beyond the end are left out, and the next host wait raises it.
        EpochError
            Without a `start`.
        """
        try:
            if self._open is not None and self._engine.again("wait", (into, at, count), stream):
                self._open = None
                return count
            self._check_started(self._open)
            if at is not None or count is not None:
                _require_append(into, at, count)
                arrays = [*map(array_of, into)]  # type: ignore[arg-type]
                count = self._engine.append(arrays, count, stream)
            else:
                given: Any = {} if into is None else into
                require_peers(self._place_of, given)
                arrays_of = {name: [*map(array_of, each)] for name, each in given.items()}
                self._engine.place(arrays_of, stream)
        except BaseException as error:
            self._fail("wait", error)
        self._open = None
        return count

    def counts(self) -> dict[Any, int]:
        """Return how many rows come from each peer; local, host-blocking until they are there.

        They hold until the next `start`.

        Raises
        ------
        CapacityError
            On GPUs, if since the last host wait rows did not fit into arrays, or were left out as
            no slot had room for them.
        ValueError
            On GPUs, if the bounds of rows were not right since then.
        """
        self._check_came("counts")
        return dict(zip(self.peers, self._engine.counts()[0], strict=True))

    def sent(self) -> dict[Any, int]:
        """Return how many rows went to each peer; as `counts`."""
        self._check_came("sent")
        return dict(zip(self.peers, self._engine.counts()[1], strict=True))

    @property
    def device_counts(self) -> AnyArray:
        """The numbers of `counts` as an array of int64, in the order of `peers`.

        On CUDA it is written on the stream, with no host wait, by each `wait` anew; read here
        between `start` and `wait`, it waits for the rows on the stream.
        """
        self._check_came("device_counts")
        return self._engine.device_counts

    def received(self, peer: Any) -> list[AnyArray]:
        """Return the rows of a peer where they came, one array a column; as `counts`.

        They may be read until the next `start`, and on GPUs until the plan is closed. There it
        raises `CapacityError` for rows that came in rounds, into the arrays of `wait`.
        """
        self._check_came("received")
        if peer not in self._place_of:
            raise ValueError(f"{self.name}: received failed: {peer!r} is none of {self.peers}")
        return self._engine.received(self._place_of[peer])

    def _check_came(self, call: str) -> None:
        self._check(call)
        if not self._engine.epoch:
            raise EpochError(f"{self.name}: {call} failed: nothing was started yet")

    def __repr__(self) -> str:
        form = self._form
        return (
            f"<mpishare.{self.name}: columns={[*map(str, form.columns)]}, room={form.room}, "
            f"{len(form.keys)} peers, routes={self._named_routes()}{self._state()}>"
        )

    @property
    def _engines(self) -> list[RowEngine]:
        return [self._engine]


def _classes(setup: PlanSetup) -> tuple[type[RowEngine], Any]:
    """Import the engine for the memory of the columns, and that of migrations."""
    if setup.on_gpu:
        from mpishare.rows.cuda import CudaRows
        from mpishare.rows.cuda_migration import CudaMigration

        return CudaRows, CudaMigration
    from mpishare.rows.host import HostRows
    from mpishare.rows.host_migration import HostMigration

    return HostRows, HostMigration


def _require_append(into: Any, at: Any, count: Any) -> None:
    if at != "append" or count is None or into is None or hasattr(into, "items"):
        raise ValueError(
            f"at={at!r}, count={count!r}: at is 'append', with a list of arrays and their count"
        )

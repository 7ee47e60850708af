"""Rows that go to the ranks that an array names: out of arrays with spare rows, and into them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.errors import CapacityError
from mpishare.memory.arguments import require_bool
from mpishare.plans.layout import array_of
from mpishare.rows.exchange import RowExchange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.memory.types import AnyArray, Array, Stream


class Migration:
    """The migration of rows between ranks, by the plan of a `RowExchange`.

    Local to make; one for each exchange, with which it is closed.

    Parameters
    ----------
    swap : RowExchange
        Its columns and peers; no call of it is open when `migrate` is called.
    stable : bool
        Whether rows that stay keep their order. By default the last ones fill the gaps: the first
        gap gets the last row that stays, the second the last but one, while they lie behind it.

    Examples
    --------
    Rows go to the rank of their number:

    >>> from mpi4py import MPI
    >>> comm = MPI.COMM_WORLD
    >>> x, to = numpy.zeros(2 * comm.size), numpy.zeros(2 * comm.size, numpy.int32)
    >>> x[: comm.size] = to[: comm.size] = numpy.arange(comm.size)
    >>> with RowExchange(comm, ["f8"], backend="host") as swap:
    ...     move = Migration(swap)
    ...     count = move.migrate([x], to, comm.size)
    ...     move.check()
    >>> bool(count == comm.size and (x[: comm.size] == comm.rank).all())
    True
    """

    def __init__(self, swap: RowExchange, *, stable: bool = False) -> None:
        if not isinstance(swap, RowExchange):
            raise TypeError(f"swap must be a RowExchange, not {swap!r}")
        is_stable = require_bool("", "stable", stable)
        swap._check("Migration")
        if swap._migration is not None:
            raise ValueError(f"{swap.name} has a Migration, which may keep rows: use that one")
        self._swap = swap
        self._engine = swap._migrates(swap._engine, stable=is_stable)
        swap._migration = self._engine

    @property
    def left(self) -> AnyArray:
        """How many rows of this rank could not be placed, as int64 of shape (). Local.

        In the memory of the columns. Those still here whose goal is another rank, and those that
        came and found the arrays full, which the plan keeps and appends first at the next call.
        """
        return self._engine.left

    def migrate(
        self, columns: Sequence[Array], to: Array, count: Any, stream: Stream | None = None
    ) -> Any:
        """Move each row to the rank that `to` names; return the new count of this rank's rows.

        Collective over the plan's ranks. Stream-ordered on CUDA, where it may be captured; else,
        and where MPI takes rows to other nodes, host-blocking. Rows that stay come first, then
        those that came, peer by peer, in the order that they had at their peer. The same rows give
        the same bits, where slots have room for them.

        Parameters
        ----------
        columns : sequence of arrays
            Those of the plan, with spare rows behind `count`, which have no meaning. The room is
            that of the shortest, `to` included.
        to : array of int32
            The rank of `comm` for each row, or -1 for one that is dropped. It goes with its row,
            and holds this rank for every row that is home afterwards. The row of a rank that is no
            peer stays, and counts as left; the next `check` raises `ValueError`.
        count : int, or array of int64 of shape ()
            Of the rows with a meaning. An array is updated.
        stream : stream, optional
            The stream that writes the columns. Default: the current one of their library.

        Returns
        -------
        array of int64 of shape ()
            The given array, or a new one.

        Raises
        ------
        TypeError, ValueError
            If an argument is not right; nothing was done then.
        EpochError
            If an exchange of the plan is open.
        UnsupportedError
            If the stream is captured, and MPI takes rows to other nodes.
        """
        swap = self._swap
        try:
            given = columns, to, count
            if swap._open is None and swap._engine.again("migrate", given, stream):
                return count
            swap._check_free("migrate")
            return self._engine.migrate([*map(array_of, columns)], array_of(to), count, stream)
        except BaseException as error:
            swap._fail("migrate", error)

    def check(self) -> None:
        """Raise while rows are left. Local, host-blocking.

        Raises
        ------
        CapacityError
            With how many rows are left for which peer.
        ValueError
            If the goals of rows are no peers.
        """
        swap = self._swap
        swap._check("check")
        stuck, strangers, kept = self._engine.stuck()
        where = (
            f"{swap.name}: check failed: rank {swap._setup.comm.rank} of {swap._setup.comm.size}"
        )
        if strangers:
            raise ValueError(
                f"{where} has {strangers} rows whose goals are no peers of the exchange. Give "
                "the ranks of peers, this rank itself, or -1, which drops a row"
            )
        if stuck or kept:
            rows = [f"{count} rows for {name!r}" for name, count in stuck.items()]
            if kept:
                rows.append(f"{kept} rows that came into full arrays")
            raise CapacityError(
                f"{where} has left {', '.join(rows)}. Call migrate again, with longer arrays if "
                "these are full"
            )

    def __repr__(self) -> str:
        return f"<mpishare.Migration by {self._swap.name}>"

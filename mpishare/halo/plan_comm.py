"""The ranks of a plan: how they agree across nodes, and which of them share this one."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from mpishare.coordination.mpi_agreement import agree
from mpishare.coordination.waits import SAY_S, WaitMonitor
from mpishare.errors import PeerTimeout
from mpishare.memory.shared import map_on_all_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from mpi4py import MPI

    from mpishare.context import NodeContext
    from mpishare.coordination.agreement import Agreement
    from mpishare.memory.shared import SharedMemory


class PlanComm:
    """The ranks of one plan. Collective, host-blocking.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The plan's own: nobody else talks on it.
    context : NodeContext
        The node on which this rank is.
    call : str
        For errors.

    Attributes
    ----------
    nodes : list of str
        For each rank of the plan, what names its node.
    ranks_here : dict of int to int
        The plan's ranks on this node, in order, each with its rank in the node.
    """

    def __init__(self, comm: MPI.Intracomm, context: NodeContext, call: str) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.context = context
        self._mates: frozenset[int] = frozenset()
        mine = [context.nonces[0], context.rank]
        told = self.step(call, lambda: mine)
        self.nodes: list[str] = [node for node, _ in told]
        self.ranks_here: dict[int, int] = {
            rank: place for rank, (node, place) in enumerate(told) if node == mine[0]
        }
        self._mates = frozenset(self.ranks_here.values())

    def step(self, call: str, work: Callable[[], Any]) -> list[Any]:
        """Do some work, then learn how it went on every rank. Collective, host-blocking."""
        agreement = self.context.agreement
        with MissingRanks(agreement, self._mates, call) as absent:
            try:
                return agree(self.comm, call, work, agreement.timeout_s, absent.look)
            except PeerTimeout as error:
                if agreement.failure is not None:
                    raise
                late = error  # which outlives this clause, for later calls
                missing = absent.missing()
                if not missing:
                    raise agreement.lose(lambda: late, fatal=True) from None
                raise agreement.timed_out(call, missing, agreement.timeout_s) from None

    def map_on_all_ranks(self, call: str, nbytes: int) -> SharedMemory:
        """Map memory that the plan's ranks on this node have in common. Collective over all."""

        def step(work: Callable[[], Any]) -> list[Any]:
            told = self.step(call, work)
            return [told[rank] for rank in self.ranks_here]

        return map_on_all_ranks(step, nbytes, is_maker=next(iter(self.ranks_here)) == self.rank)

    def wait(self, call: str, pending: Callable[[], Sequence[int]]) -> None:
        """Wait on the host until none of the ranks here is pending; see `Waits.wait`."""
        ranks_here = self.ranks_here
        self.context.agreement.wait(call, lambda: [ranks_here[rank] for rank in pending()])


_SAID_S = 4 * SAY_S


class MissingRanks:
    """Says in the control block that this rank waits in a call, and reads who else does. Local.

    Parameters
    ----------
    agreement : Agreement
        Of the node.
    mates : collection of int
        The node's ranks that must make the call.
    call : str
        Its name.
    """

    def __init__(self, agreement: Agreement, mates: Collection[int], call: str) -> None:
        self._agreement = agreement
        self._mates = [rank for rank in mates if rank != agreement.rank]
        self._call = call
        self._watch = WaitMonitor(agreement, call)

    def look(self) -> None:
        """Raise if the node is broken or ranks wait in a cycle; warn of those that are late."""
        self._agreement.check()
        self._watch.look(self._now)

    def missing(self) -> list[int]:
        """Return who is absent once those that came just now have had the time to say so."""
        until = time.monotonic() + _SAID_S
        while (absent := self._now()) and time.monotonic() < until:
            os.sched_yield()
        return absent

    def __enter__(self) -> MissingRanks:
        """Return itself."""
        return self

    def __exit__(self, *_: Any) -> None:
        """Say that this rank goes on."""
        self._watch.end()

    def _now(self) -> list[int]:
        """Return those that wait in no call of that name."""
        status = self._agreement.block.status
        said = {rank: status(rank) for rank in self._mates}
        return [rank for rank, each in said.items() if each is None or each.call != self._call]

"""The ranks of a plan: how they agree across nodes, and which of them share this one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.common import map_common
from mpishare.errors import PeerTimeout
from mpishare.halo.absent import Absent
from mpishare.messages import agree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

    from mpishare.ground import Ground
    from mpishare.shm import SharedMemory


class Ranks:
    """The ranks of one plan. Collective, host-blocking.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The plan's own: nobody else talks on it.
    ground : Ground
        The node on which this rank is.
    call : str
        For errors.

    Attributes
    ----------
    nodes : list of str
        For each rank of the plan, what names its node.
    team : dict of int to int
        The plan's ranks on this node, in order, each with its rank in the node.
    """

    def __init__(self, comm: MPI.Intracomm, ground: Ground, call: str) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.ground = ground
        self._mates: frozenset[int] = frozenset()
        mine = [ground.nonces[0], ground.rank]
        told = self.step(call, lambda: mine)
        self.nodes: list[str] = [node for node, _ in told]
        self.team: dict[int, int] = {
            rank: place for rank, (node, place) in enumerate(told) if node == mine[0]
        }
        self._mates = frozenset(self.team.values())

    def step(self, call: str, work: Callable[[], Any]) -> list[Any]:
        """Do some work, then learn how it went on every rank. Collective, host-blocking."""
        agreement = self.ground.agreement
        with Absent(agreement, self._mates, call) as absent:
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

    def map_common(self, call: str, nbytes: int) -> SharedMemory:
        """Map memory that the plan's ranks on this node have in common. Collective over all."""

        def step(work: Callable[[], Any]) -> list[Any]:
            told = self.step(call, work)
            return [told[rank] for rank in self.team]

        return map_common(step, nbytes, is_maker=next(iter(self.team)) == self.rank)

    def wait(self, call: str, lagging: Callable[[], Sequence[int]]) -> None:
        """Wait on the host until none of the team lags; see `Waits.wait`."""
        team = self.team
        self.ground.agreement.wait(call, lambda: [team[rank] for rank in lagging()])

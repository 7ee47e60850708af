"""What a plan asks of an engine, which moves its cells, and what all ranks agreed on before.

There is one engine for fields in host memory (`mpishare.halo.host`), one for fields in GPU memory
(`mpishare.halo.cuda`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

    from mpishare.context import Location, NodeContext
    from mpishare.coordination.rank_group import RankGroup
    from mpishare.halo.layout import FieldLayout
    from mpishare.halo.message import MessageInfo
    from mpishare.halo.node_cache import NodeCache
    from mpishare.halo.plan_comm import PlanComm
    from mpishare.node import Node
    from mpishare.ordering.stream_chain import StreamChain


@dataclass
class Said:
    """What all ranks of a plan said of it, and what follows from these words alone.

    A program that drops its plans makes the same ones again and again.

    Attributes
    ----------
    words : list of dict
        For each rank, its layouts, arguments and geometry.
    known : dict
        What was found out for an earlier plan, the same on all ranks.
    """

    words: list[dict[str, Any]]
    known: dict[str, Any] = field(default_factory=dict)


@dataclass
class PlanSetup:
    """What the ranks of a plan agreed on, filled in step by step by `mpishare.halo.setup`.

    Attributes
    ----------
    call, name : str
        The call and the plan: ``HaloExchange``, ``HaloExchange 1``.
    given_comm, given_node
        The communicator and the node, or None, that the user gave.
    group, comm : RankGroup, PlanComm
        The plan's ranks, and how they talk once the node is known.
    node, context, cache
        The plan's node, and the cache that keeps it for plans without ``node=``.
    backend : str
        That of the fields: ``"cuda"`` or ``"host"``; ``"auto"``, that of the node, if they are all
        stood for by a `Layout`.
    fields : list of arrays
        Those that the plan is made with; empty if one of them is a `Layout`.
    takes_any : bool
        Whether a `Layout` without dtype stands for the fields: each call says what they are.
    on_gpu : bool
        Where the fields are, on all ranks.
    layouts : list of list of FieldLayout
        For each rank, the layouts of its fields.
    same : dict
        The arguments that are the same on all ranks.
    chain : StreamChain or None
        What orders the calls on the plan on CUDA.
    sends, recvs : list of list of MessageInfo
        For each rank, what it sends and receives.
    routes : list of dict of int to str
        For each rank, its route to each peer.
    locations : list of list of Location or None
        On CUDA, for each rank, where each of its fields lies in a window on its GPU that other
        ranks use too; None elsewhere.
    said : Said
        What the ranks said, remembered from an earlier plan if they said the same.
    news : list of list of int
        For each rank, the plans that it has dropped; see `Dropped`.
    look : callable
        Called while this rank waits for the others' words; may raise.
    wrong : Exception or None
        What is wrong with what this rank gave, while it waits to tell the others.
    begin : float, seconds
        When the setup began, on the performance counter.
    """

    call: str
    given_comm: MPI.Intracomm
    group: RankGroup
    given_node: Any
    name: str = ""
    node: Node = field(init=False)
    context: NodeContext = field(init=False)
    cache: NodeCache | None = None
    comm: PlanComm = field(init=False)
    backend: str = "auto"
    fields: list[Any] = field(default_factory=list)
    takes_any: bool = False
    on_gpu: bool = False
    layouts: list[list[FieldLayout]] = field(default_factory=list)
    same: dict[str, Any] = field(default_factory=dict)
    chain: StreamChain | None = None
    sends: list[list[MessageInfo]] = field(default_factory=list)
    recvs: list[list[MessageInfo]] = field(default_factory=list)
    routes: list[dict[int, str]] = field(default_factory=list)
    locations: list[list[Location | None]] = field(default_factory=list)
    said: Said = field(default_factory=lambda: Said([]))
    news: list[list[int]] = field(default_factory=list)
    look: Callable[[], object] = int
    wrong: Exception | None = None
    begin: float = field(default_factory=perf_counter)

    def noting(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Return a callable that does the work and notes its error as what is `wrong`."""

        def do() -> Any:
            try:
                return work()
            except Exception as error:
                self.wrong = error
                raise

        return do

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what follows from what was said, made for the first plan of which it was."""
        if name not in self.said.known:
            self.said.known[name] = make()
        return self.said.known[name]

    def close(self) -> None:
        """Give back the communicator and the node. Collective, once all have agreed on it."""
        if hasattr(self, "comm"):
            self.comm.close()
        self.group.release()
        if self.cache is not None:
            self.cache.release(self.backend, self.node)

    @property
    def mine(self) -> list[FieldLayout]:
        """The layouts of this rank's fields."""
        return self.layouts[self.comm.rank]

    @property
    def my_routes(self) -> dict[int, str]:
        """The route of this rank to each peer."""
        return self.routes[self.comm.rank]

    @staticmethod
    def call_name(*, is_reverse: bool) -> str:
        """Return what errors call an exchange of a direction, with `start` and `wait`, too."""
        return "accumulate" if is_reverse else "exchange"

    def messages_by_rank(self, *, is_reverse: bool) -> list[list[MessageInfo]]:
        """Return for each rank what it sends; in the reverse exchange, what it else receives."""
        return self.recvs if is_reverse else self.sends


class PlanEngine(Protocol):
    """What a plan of any kind asks of an engine when it is watched and closed. Local.

    Attributes
    ----------
    staging_nbytes : int, bytes
        Of staging memory: that of this rank, and that which its node shares.
    """

    staging_nbytes: int

    def pending(self) -> list[int]:
        """Ranks of the node whose call this rank's stream waits for."""
        ...

    def finish_at_exit(self, deadline: float) -> None:
        """At process exit: publish whether all exchanges that began are over by the deadline."""
        ...

    def drain(self) -> None:
        """Wait until nothing is under way on this rank, with the deadline of the node."""
        ...

    def release(self) -> None:
        """Unmap what other ranks own: the first half of closing, before any rank frees."""
        ...

    def close(self) -> None:
        """Free what this rank owns, once all ranks have released."""
        ...


class Engine(PlanEngine, Protocol):
    """Moves the cells of one plan in one direction: to the ghosts, or back from them.

    Making one is collective over the plan and host-blocking; the methods are local where nothing
    else is said, and stream-ordered on CUDA.
    """

    def prepare(self, fields: Sequence[Any]) -> Any:
        """Check the arrays of a call; return what the other methods take, which holds them."""
        ...

    def try_fast(self, fields: Sequence[Any], stream: Any) -> bool:
        """Exchange fields that were seen before, or return False with nothing done."""
        ...

    def try_start(self, fields: Sequence[Any], stream: Any) -> bool:
        """Start an exchange of fields that were seen before, or return False as `try_fast`."""
        ...

    def try_wait(self, stream: Any) -> bool:
        """End what `try_start` has begun, or return False with nothing done."""
        ...

    def start(self, call: Any, stream: Any) -> None:
        """Send my cells."""
        ...

    def wait(self, call: Any, stream: Any) -> None:
        """Receive the others' cells into the ghosts."""
        ...

    def exchange(self, call: Any, stream: Any) -> None:
        """Start and wait in one call."""
        ...

    def ahead(self) -> list[int]:
        """Ranks of the node that have called more often than this one."""
        ...

    def is_captured(self, fields: Sequence[Any], stream: Any) -> bool:
        """Whether the stream of a call is being captured into a graph."""
        ...

"""Interfaces between a plan and its engines, and the setup that all ranks have agreed on.

Fields in host memory are moved by `mpishare.halo.host`, fields in GPU memory by
`mpishare.halo.cuda`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

    from mpishare.coordination.rank_group import RankGroup
    from mpishare.node import Node
    from mpishare.plans.comm import PlanComm
    from mpishare.plans.layout import FieldLayout
    from mpishare.plans.message import MessageInfo
    from mpishare.plans.node_cache import NodeCache
    from mpishare.runtime.context import Location, NodeContext
    from mpishare.windows.stream_chain import StreamChain


@dataclass
class AgreedPlan:
    """Cache of agreed plan metadata, kept for the next plan with equal descriptions on all ranks.

    A program that drops its plans makes the same ones again and again.
    """

    descriptions: list[dict[str, Any]]  # by rank: layouts, arguments and geometry
    known: dict[str, Any] = field(default_factory=dict)  # the same on all ranks


@dataclass
class PlanSetup:
    """All that the ranks of a plan agreed on, filled in step by step by `mpishare.plans.setup`."""

    call: str  # of the user: ``HaloExchange``
    given_comm: MPI.Intracomm
    group: RankGroup
    given_node: Any
    name: str = ""  # of the plan: ``HaloExchange 1``
    node: Node = field(init=False)
    context: NodeContext = field(init=False)
    cache: NodeCache | None = None  # of the node, if the plan is without ``node=``
    comm: PlanComm = field(init=False)  # once the node is known
    backend: str = "auto"  # of the fields; "auto", that of the node, if each is a `Layout`
    fields: list[Any] = field(default_factory=list)  # empty if one is a `Layout`
    is_compiled: bool = False  # all ranks have the compiled part of the host backend
    takes_any: bool = False  # the fields are a `Layout` without dtype
    on_gpu: bool = False  # the same on all ranks
    # By rank, each of its fields.
    layouts: list[list[FieldLayout]] = field(default_factory=list)
    same: dict[str, Any] = field(default_factory=dict)  # arguments, equal on all ranks
    chain: StreamChain | None = None  # orders the plan's calls on CUDA
    # By rank, for each message, and for each peer.
    sends: list[list[MessageInfo]] = field(default_factory=list)
    recvs: list[list[MessageInfo]] = field(default_factory=list)
    routes: list[dict[int, str]] = field(default_factory=list)
    # By rank, each field's location in a window on its GPU that other ranks use too.
    locations: list[list[Location | None]] = field(default_factory=list)
    agreed: AgreedPlan = field(default_factory=lambda: AgreedPlan([]))
    dropped: list[list[int]] = field(default_factory=list)  # by rank; see `Dropped`
    look: Callable[[], object] = int  # called while this rank waits for the others; may raise
    wrong: Exception | None = None  # in this rank's arguments, until the agreement raises it
    begin: float = field(default_factory=perf_counter)  # seconds

    def noting(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Return `work` with its error kept in `wrong`."""

        def do() -> Any:
            try:
                return work()
            except Exception as error:
                self.wrong = error
                raise

        return do

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return cached metadata, made for the first plan with these descriptions."""
        if name not in self.agreed.known:
            self.agreed.known[name] = make()
        return self.agreed.known[name]

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
        """This rank's route to each peer."""
        return self.routes[self.comm.rank]

    @staticmethod
    def call_name(*, is_reverse: bool) -> str:
        """Return the name of a direction's calls, `start` and `wait` included, in errors."""
        return "accumulate" if is_reverse else "exchange"

    def messages_by_rank(self, *, is_reverse: bool) -> list[list[MessageInfo]]:
        """Return each rank's messages to send; the reverse exchange swaps them with `recvs`."""
        return self.recvs if is_reverse else self.sends


class PlanEngine(Protocol):
    """The part of an engine that watching and closing a plan of any kind needs."""

    staging_nbytes: int  # of this rank, and those that its node shares

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
        """Unmap memory of other ranks: the first half of closing, before any rank frees."""
        ...

    def close(self) -> None:
        """Free this rank's memory, once all ranks have released."""
        ...


class HostPlanEngine:
    """Calls that are over when they return, and memory that each rank unmaps in `close`."""

    def is_captured(self, fields: Sequence[Any], stream: Any) -> bool:  # noqa: ARG002  no streams
        """Return False: there is no stream."""
        return False

    def pending(self) -> list[int]:
        """Return no ranks: waits on the host report their own stragglers."""
        return []

    def finish_at_exit(self, deadline: float) -> None:
        """Do nothing: all that was begun is over, since calls block."""

    def drain(self) -> None:
        """Do nothing: calls block."""

    def release(self) -> None:
        """Do nothing: each rank unmaps the shared memory in `close`."""


class Engine(PlanEngine, Protocol):
    """Moves the cells of one plan in one direction: to the ghosts, or back from them.

    Making one is collective over the plan and host-blocking; methods are local unless stated
    otherwise, and stream-ordered on CUDA.
    """

    def prepare(self, fields: Sequence[Any]) -> Any:
        """Check the arrays of a call; return the others' `call`, which holds them."""
        ...

    def try_fast(self, fields: Sequence[Any], stream: Any) -> bool:
        """Exchange fields that the engine knows, or return False with nothing done."""
        ...

    def try_start(self, fields: Sequence[Any], stream: Any) -> bool:
        """Start an exchange of fields that the engine knows, or return False with nothing done."""
        ...

    def try_wait(self, stream: Any) -> bool:
        """Complete an exchange begun by `try_start`, or return False with nothing done."""
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
        """Ranks of the node that have made more calls than this one."""
        ...

    def is_captured(self, fields: Sequence[Any], stream: Any) -> bool:
        """Whether the stream of a call is being captured into a graph."""
        ...

"""The setup that all ranks of a plan have agreed on, and what plans of any kind need of engines.

Fields in host memory are moved by `mpishare.plans.exchange.host`, fields in GPU memory by
`mpishare.plans.exchange.cuda`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from mpishare.plans.rings import Shifts

if TYPE_CHECKING:
    from mpishare.plans.comm import PlanComm
    from mpishare.plans.layout import FieldLayout
    from mpishare.plans.message import Message, MessageInfo
    from mpishare.runtime.context import Location, NodeContext
    from mpishare.runtime.route import Route
    from mpishare.runtime.stream_chain import StreamChain


FieldsCall = Callable[[Sequence[Any], Any], Any]
"""Called with the fields and the ``stream=`` of a call."""


@dataclass(frozen=True)
class PlanSetup:
    """All that the ranks of a plan agreed on before its engine is made."""

    call: str  # of the user: ``HaloExchange``
    name: str  # of the plan: ``HaloExchange 1``
    context: NodeContext
    comm: PlanComm
    on_gpu: bool  # the same on all ranks
    takes_any: bool  # the fields are a `Layout` without dtype
    layouts: list[list[FieldLayout]]  # by rank, of each of its fields
    same: dict[str, Any]  # arguments, equal on all ranks
    begin: float  # seconds

    @property
    def wire(self) -> str | None:
        """The type in which cells travel, if it is not that of the fields."""
        return self.same.get("wire")

    @property
    def mine(self) -> list[FieldLayout]:
        return self.layouts[self.comm.rank]


@dataclass(frozen=True)
class RoutedSetup(PlanSetup):
    """The setup of one direction of a plan that moves cells: its messages, the route of each."""

    # This rank's, with their cells in its fields.
    my_sends: Sequence[Message]
    my_recvs: Sequence[Message]
    # By rank, for each message, and for each peer.
    sends: list[list[MessageInfo]]
    recvs: list[list[MessageInfo]]
    routes: list[dict[int, Route]]
    # By rank, each field's location in a window on its GPU that other ranks use too.
    locations: list[list[Location | None]]
    # Whether all ranks have the compiled part of the host backend, and it knows the numbers of this
    # direction, and of the reverse: else none uses it.
    is_compiled: bool
    is_reverse_compiled: bool
    chain: StreamChain  # orders the plan's calls on CUDA
    # Names of calls, `start` and `wait` included, in errors: of this direction, of the other one.
    calls: tuple[str, str] = ("exchange", "accumulate")
    adds: bool = False  # what arrives
    zeroes: bool = False  # what it sends
    reverse_tag: int = 0  # above all tags of an exchange: the least one of its reverse
    shifts: Shifts = field(default_factory=Shifts)  # of parts that slide
    # Layouts of the arrays that calls on GPUs get, where not `mine`, and their axes made those.
    given: Sequence[FieldLayout] = ()
    as_fields: Callable[[Sequence[Any]], Sequence[Any]] = list

    @property
    def my_routes(self) -> dict[int, Route]:
        """This rank's route to each peer."""
        return self.routes[self.comm.rank]

    @property
    def host_routes(self) -> list[Route]:
        """The routes of all ranks that need the host at every call: no graph records it."""
        used = {route for routes in self.routes for route in routes.values()}
        return sorted(route for route in used if route.waits_in == "host")

    @property
    def gives_back(self) -> bool:
        """Whether both ways are one."""
        return self.adds and not self.zeroes

    @property
    def full_call(self) -> str:
        """The name of the plan and of the calls of this direction, in errors."""
        return f"{self.name}: {self.calls[0]}"

    def turned(self, *, adds: bool) -> RoutedSetup:
        """Return the setup of the other direction.

        Its messages have tags of their own: MPI would match those of an exchange on one rank with
        those of the reverse on another.
        """
        above = 1 + max((each.tag for messages in self.sends for each in messages), default=0)

        def back(messages: Any) -> list[Any]:
            return [each._replace(tag=above + each.tag) for each in messages]

        return replace(
            self,
            my_sends=back(self.my_recvs),
            my_recvs=back(self.my_sends),
            sends=[*map(back, self.recvs)],
            recvs=[*map(back, self.sends)],
            calls=self.calls[::-1],
            adds=adds,
            zeroes=adds,
            reverse_tag=above,
            is_compiled=self.is_reverse_compiled if adds else self.is_compiled,
        )

    def both_ways(self) -> RoutedSetup:
        """Return the setup of both directions at once: either end adds what the other one has."""
        back = self.turned(adds=True)
        return replace(
            back,
            calls=(f"{back.calls[0]}(give_back=True)", back.calls[1]),
            zeroes=False,
            my_sends=[*self.my_sends, *back.my_sends],
            my_recvs=[*self.my_recvs, *back.my_recvs],
            sends=[there + here for there, here in zip(self.sends, back.sends, strict=True)],
            recvs=[there + here for there, here in zip(self.recvs, back.recvs, strict=True)],
        )


class PlanEngine(Protocol):
    """The part of an engine that watching and closing a plan of any kind needs.

    As they stand here, the methods are those of calls that are over when they return, which report
    their own stragglers, and of memory that each rank unmaps in `close`.
    """

    staging_nbytes: int  # of this rank, and those that its node shares
    has_imports: bool = False  # memory that `release` unmaps; the same on all ranks

    def is_captured(self, fields: Sequence[Any], stream: Any) -> bool:  # noqa: ARG002
        """Whether the stream of a call is being captured into a graph."""
        return False

    def pending(self) -> list[int]:
        """Ranks of the node whose call this rank's stream waits for."""
        return []

    def check_elsewhere(self) -> None:
        """Break the node if a rank of another node is lost or late. In the watchdog's thread."""
        return

    def late_elsewhere(self, call: str) -> Exception | None:  # noqa: ARG002
        """Return the error of ranks of other nodes that this rank's stream waits for, if any."""
        return None

    def is_over(self) -> bool:
        """Whether all calls that began are over, and the others need nothing of this rank."""
        return True

    def drain(self) -> None:
        """Wait until nothing is under way on this rank, with the deadline of the node."""
        return

    def release(self) -> None:
        """Unmap memory of other ranks: the first half of closing, before any rank frees."""
        return

    def close(self) -> None:
        """Free this rank's memory, once all ranks have released."""
        ...

"""The ranks of a communicator, as plans see them: one communicator, however many plans there are.

MPI has some thousand communicators, and to make one is collective. So the plans of the same ranks,
on whatever communicators the user gave, share one; tags and the numbers of the calls tell them
apart.
"""

from __future__ import annotations

from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from mpishare.coordination.mpi_agreement import (
    agree_keeping,
    identify,
    known,
    pass_on,
    wait_request,
)
from mpishare.errors import MpiShareError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpi4py import MPI

    from mpishare.coordination.control_block import ControlBlock
    from mpishare.coordination.mpi_agreement import Watch

T = TypeVar("T")


class RankGroup:
    """Ranks in some order, and a communicator of mpishare's own for them. Made by `of`.

    The communicator is freed with the last of its `plans` and of the nodes that keep it for others.
    """

    _all: ClassVar[list[RankGroup]] = []

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.ranks = known(comm)
        self.plans = 0
        self._places: set[int] = set()
        # Nodes that are kept for plans without a given one, by the backend of these.
        self.nodes: dict[str, Any] = {}
        # The blocks of nodes that have all ranks of the group, and keep it until they are closed.
        self.blocks: list[ControlBlock] = []
        # While a wait has not received its messages: they may meet those of a later call.
        self._is_waiting = False
        self._is_left = False  # for a new communicator, by all ranks
        self._thread = get_ident()

    @classmethod
    def of(
        cls, given: MPI.Intracomm, watch: Watch, meet: Callable[[bool], bool] = bool
    ) -> RankGroup:
        """Return the group of a communicator's ranks, with one more plan.

        Local but for `meet` if there is one and the ranks of `given` are known; else collective
        over `given`, host-blocking: it raises `PeerTimeout` if not all ranks call it, and
        `MpiShareError` if MPI has no communicator left.

        `meet` takes whether this rank needs a new communicator, waits for the other ranks without
        MPI where that is possible, and returns whether any of them needs one.
        """
        ranks = identify(given, watch)
        # A copy: other threads make and free groups of theirs meanwhile.
        mine = [each for each in [*cls._all] if each._thread == get_ident() and each.ranks == ranks]
        found = next((each for each in mine if not each._is_spoiled()), None)
        if meet(found is None) and found is not None:
            found._is_left = True
            found = None
        if found is None:
            found = cls(duplicate(given, watch))
            cls._all.append(found)
        found.plans += 1
        return found

    def _is_spoiled(self) -> bool:
        """Whether messages may be left behind, by this rank or one of the same node.

        The others must know: making the next communicator is collective.
        """
        return self._is_left or self._is_waiting or any(each.departures() for each in self.blocks)

    def take_place(self) -> int:
        """Return the tag of a new plan among all plans that may send messages, on whatever node.

        The same on all ranks. A plan that was abandoned keeps its own.
        """
        place = next(n for n in range(len(self._places) + 1) if n not in self._places)
        self._places.add(place)
        return place

    def give_place(self, place: int) -> None:
        self._places.remove(place)

    def release(self) -> None:
        """Remove a plan. Collective: the communicator may be freed."""
        self.plans -= 1
        self.free_unused()

    def free_unused(self) -> None:
        if not self.plans and not self.blocks:
            RankGroup._all.remove(self)
            self.comm.Free()

    def step_keeping(self, work: Callable[[], tuple[T, Any]], watch: Watch) -> tuple[T, list[Any]]:
        """Do `Agreement.step_keeping` by messages. Collective, host-blocking."""
        self._is_waiting = True

        def arrived() -> None:
            self._is_waiting = False

        return agree_keeping(self.comm, work, watch, arrived=arrived)

    def wait(self, request: MPI.Request, watch: Watch, *memory: Any) -> None:
        """Wait for a collective on `comm`, as `wait_request`."""
        self._is_waiting = True
        wait_request(request, watch, *memory)
        self._is_waiting = False


@contextmanager
def making_communicators(call: str) -> Iterator[None]:
    """Add the number of open plans to the error where MPI has no communicator left."""
    from mpi4py import MPI

    try:
        yield
    except MPI.Exception as error:
        why = str(error).splitlines()[-1]
        groups = len(RankGroup._all)
        plans = sum(group.plans for group in RankGroup._all)
        raise MpiShareError(
            f"{call} failed: MPI made no communicator ({why}). mpishare has {plans} plans open "
            f"on this rank, on {groups} communicators: one for all plans of the same ranks. Free "
            "communicators that the program made and needs no more (cart.Free())."
        ) from error


def require_intracomm(
    call: str, comm: Any, wanted: str = "comm must be an Intracomm"
) -> MPI.Intracomm:
    """Return a communicator that has this rank; `TypeError` for anything else."""
    from mpi4py import MPI

    if isinstance(comm, MPI.Intracomm) and comm != MPI.COMM_NULL:
        return comm
    is_null = isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL
    if isinstance(getattr(comm, "comm", None), MPI.Intracomm):
        raise TypeError(
            f"{call} failed: the communicator comes first: node.comm, not the {type(comm).__name__}"
        )
    kind = "COMM_NULL: this rank is not in it, or it was freed" if is_null else type(comm).__name__
    raise TypeError(f"{call} failed: {wanted}, not {kind}")


def duplicate(given: MPI.Intracomm, watch: Watch) -> MPI.Intracomm:
    """Return a duplicate of a communicator, whose ranks are known. Collective, host-blocking."""
    identify(given, watch)
    with making_communicators(watch.call):
        comm, request = given.Idup()
        wait_request(request, watch, comm)
    pass_on(given, comm)
    return comm

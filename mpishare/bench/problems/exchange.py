"""An exchange of faces: what its variants, mpishare's and the baselines', know of the problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mpishare.bench.comparison import Variant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi4py import MPI

    from mpishare.bench.problems.check import HaloCheck, RingCheck
    from mpishare.bench.session import Session


@dataclass(frozen=True)
class Side:
    """A side of a block, through which cells leave for one rank, and the opposite ghosts arrive.

    All ranks list their sides in the same order, and what leaves through a side of one rank arrives
    as the same side of another: `number` serves as a tag.
    """

    to: int  # ranks in the communicator of the problem
    source: int
    number: int
    out: Any  # index of the cells that `to` gets
    into: Any  # index of the ghosts that `source` fills


class Problem:
    """One exchange: the data, the neighbors and the check."""

    session: Session
    comm: MPI.Intracomm  # of messages, with the ranks of the session's
    #: Private memory of this rank, which all variants without memory of their own use by turns.
    fields: Sequence[Any]
    #: The sides, whose faces may move at the same time.
    sides: tuple[Side, ...]
    check: HaloCheck | RingCheck
    #: Whether `fields` are two contiguous buffers, of all that leaves and all that arrives, which a
    #: variant may put into any memory; otherwise it packs.
    has_buffers = False
    #: Why a baseline that spins cannot run here.
    oversubscribed: str | None = None

    def sides_by_axis(self) -> Sequence[tuple[Side, ...]]:
        """Return the faces of each axis, which may need the ghosts of the axes before it."""
        raise NotImplementedError

    def leaving(self, side: Side, fields: Sequence[Any]) -> list[Any]:
        """Return the cells of each field that leave through a side."""
        return [field[side.out] for field in fields]

    def arriving(self, side: Side, fields: Sequence[Any]) -> list[Any]:
        """Return the ghosts of each field that arrive as a side."""
        return [field[side.into] for field in fields]


P = TypeVar("P", bound=Problem)


class Exchange(Variant, Generic[P]):
    """A variant that exchanges the ghosts of `fields`."""

    def __init__(self, problem: P, fields: Sequence[Any] | None = None) -> None:
        self.problem = problem
        self.fields = tuple(problem.fields if fields is None else fields)
        # Ghosts that no exchange may write are compared too, from the first step on.
        self.poison()

    def current(self) -> Sequence[Any]:
        """Return the fields of the last step, where a variant alternates between several."""
        return self.fields

    def fill(self, token: int) -> None:
        """Write what the neighbors get."""
        self.problem.check.fill(self.current(), token)

    def poison(self) -> None:
        """Overwrite the ghosts."""
        self.problem.check.poison(self.current())

    def verify(self, token: int) -> None:
        """Compare the ghosts with what their owners filled."""
        self.problem.check.verify(self.current(), token)

    def wrong(self) -> int:
        """Return how many words were wrong."""
        return self.problem.check.wrong()

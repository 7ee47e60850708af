"""An exchange of faces: what its variants, mpishare's and the baselines', know of the problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mpishare.bench.comparison import Variant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi4py import MPI

    from mpishare.bench.session import Session


@dataclass(frozen=True)
class Faces:
    """What leaves through one side of a block, and what arrives through it, in all fields.

    All ranks list their sides in the same order, and what leaves through a side of one rank arrives
    as the same side of another: `number` serves as a tag.

    Attributes
    ----------
    to, source, number : int
        Ranks in the communicator of the problem, and the number of the side.
    out, into : list of array
        For each field the cells that `to` gets, and the ghosts that `source` fills.
    """

    to: int
    source: int
    number: int
    out: list[Any]
    into: list[Any]


class Problem:
    """One exchange: the data, the neighbors and the check.

    Attributes
    ----------
    session : Session
        The run.
    comm : MPI.Intracomm
        The communicator of messages, with the ranks of the session's.
    fields : sequence of array
        Private memory of this rank, which all variants without memory of their own work on in turn.
    has_buffers : bool
        Whether `fields` are two contiguous buffers, of all that leaves and all that arrives, side
        by side, which a variant may put into any memory; otherwise it packs.
    """

    session: Session
    comm: MPI.Intracomm
    fields: Sequence[Any]
    has_buffers = False

    def faces(self, fields: Sequence[Any]) -> list[Faces]:
        """Return all sides, whose faces may move at the same time."""
        raise NotImplementedError

    def phases(self, fields: Sequence[Any]) -> list[list[Faces]]:
        """Return the sides in phases, each of which may need the ghosts of those before it."""
        raise NotImplementedError

    def fill(self, fields: Sequence[Any], token: int) -> None:
        """Write what this rank sends in step `token`."""
        raise NotImplementedError

    def poison(self, fields: Sequence[Any]) -> None:
        """Overwrite all ghosts."""
        raise NotImplementedError

    def verify(self, fields: Sequence[Any], token: int) -> None:
        """Count the words that are not what step `token` leaves there."""
        raise NotImplementedError

    def wrong(self) -> int:
        """Return how many words were wrong since the last call; waits for the GPU."""
        raise NotImplementedError


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
        self.problem.fill(self.current(), token)

    def poison(self) -> None:
        """Overwrite the ghosts."""
        self.problem.poison(self.current())

    def verify(self, token: int) -> None:
        """Compare the ghosts with what their owners filled."""
        self.problem.verify(self.current(), token)

    def wrong(self) -> int:
        """Return how many words were wrong."""
        return self.problem.wrong()

"""A link between two GPUs, and what is asked of a library that moves words along such links."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mpishare.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mpishare.bench.session import Session


@dataclass(frozen=True)
class Link:
    """Words that leave for one rank in a step, and as many that land from another.

    All ranks list their links in the same order, and what leaves through the k-th of one lands
    through the k-th of another: where one library wants places that are the same on all ranks, the
    k-th place is.

    Attributes
    ----------
    to, source : int
        Ranks in the session's communicator.
    out, into : array of 64-bit words, contiguous
        What leaves, and where words from `source` land.
    """

    to: int
    source: int
    out: Any
    into: Any

    @property
    def words(self) -> int:
        """How many words move each way."""
        return int(self.out.size)


class Library:
    """A library that moves words between the GPUs of a run. Made once a run.

    Collective, host-blocking: what a library sets up before the first word can move.

    Attributes
    ----------
    label : str
        Its name in reasons.
    halves : int
        In how many places words land in turn. Two where a rank writes into another's memory, or
        lets MPI write into its own, before the reader of the step before is known to be done.
    is_direct : bool
        Whether it takes any memory of the GPU, and not only what `empty` gives.
    needs_own_gpu : bool
        Whether it refuses ranks that share a GPU.
    """

    label: ClassVar[str]
    halves: ClassVar[int] = 1
    is_direct: ClassVar[bool] = False
    needs_own_gpu: ClassVar[bool] = True

    def __init__(self, session: Session) -> None:
        self.session = session

    @classmethod
    def require(cls, session: Session) -> None:
        """Refuse to be made on this rank. Local.

        Raises
        ------
        UnsupportedError
            Where the library is not installed, or will not work.
        """

    def empty(self, words: int) -> Any:
        """Return memory of the GPU that words can leave from and land in. Collective."""
        raise NotImplementedError

    def mover(self, links: Sequence[Link], *, early: bool) -> Callable[[], None]:
        """Return what moves the words of all `links` once, stream-ordered or host-blocking.

        Collective. What is put on the stream afterwards finds the words where they land.

        Parameters
        ----------
        links : sequence of Link
            In the same order on all ranks.
        early : bool
            Whether words may land as soon as the ranks have come to this step, before the stream
            has: the places are of `empty`, and there are `halves` of them.
        """
        raise NotImplementedError

    def free(self, memory: Any) -> None:
        """Give back what `empty` gave. Collective."""

    def close(self) -> None:
        """End it. Collective."""


@contextmanager
def refusals(label: str, *errors: type[Exception]) -> Iterator[None]:
    """Say a library's own errors as a reason why it cannot run here.

    Local. Of what it says the first line: the others tell where in the library that was.

    Raises
    ------
    UnsupportedError
        For an exception of `errors`.
    """
    try:
        yield
    except errors as exc:
        said = str(exc).strip().splitlines()
        raise UnsupportedError(f"{label}: {said[0] if said else type(exc).__name__}") from exc


def open_library(session: Session, kind: type[Library]) -> tuple[Library | None, str | None]:
    """Return the library, or why this run cannot have it. Made once a run.

    Collective, host-blocking.
    """
    return session.once(kind.label, lambda: _open(session, kind))


def _open(session: Session, kind: type[Library]) -> tuple[Library | None, str | None]:
    if kind.needs_own_gpu and session.crowd > 1:
        return None, f"{kind.label}: two ranks on one GPU"
    # Agreed on before any rank enters the library, which would wait for the others there.
    _, reason = session.attempt(lambda: kind.require(session))
    if reason is not None:
        return None, reason
    return session.attempt(lambda: kind(session))

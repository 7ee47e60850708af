"""An arm: one way to do what a case times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.bench.rows import Kind


class Arm:
    """One way to do what a case times, and to check that it did it.

    All methods are called by every rank in the same order. On CUDA they are stream-ordered, save
    `wrong`, which waits for the GPU.

    Attributes
    ----------
    moves : bool
        Whether `step` moves what `fill` wrote, so that a timed block can be checked afterwards.
        An arm that only orders is checked by `checked_step` alone.
    """

    moves = True

    def step(self) -> None:
        """Do once what is timed."""
        raise NotImplementedError

    @property
    def call(self) -> Callable[[], object]:
        """What `step` calls, with as little as can be around it: for the time of a call itself."""
        return self.step

    def fill(self, token: int) -> None:
        """Write what this rank sends; `token` tells one step from the next."""

    def poison(self) -> None:
        """Overwrite what this rank received last, so that it cannot pass for the next."""

    def count(self, token: int) -> None:
        """Count the words received that are not those of `token`."""

    def checked_step(self, token: int) -> None:
        """Do one step with data, count what arrived wrong, and spoil it for the next."""
        self.check_around(self.step, token)

    def check_around(self, step: Callable[[], None], token: int) -> None:
        """Do the same with `step`, which does what this arm's does."""
        self.fill(token)
        step()
        self.count(token)
        self.poison()

    def wrong(self) -> int:
        """Return how many words were wrong since the last call."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what the arm made."""


@dataclass(frozen=True)
class Entry:
    """An arm as a case enters it: how to make it, and what it is measured beside.

    Attributes
    ----------
    name : str
        The arm's name in the report.
    make : callable
        Makes the arm. Collective.
    sent_nbytes : int, bytes
        What one rank sends in a step, for the rate; 0 where no data moves.
    against : tuple of str
        The rivals that its ratio is taken against; empty for what is not mpishare's.
    kind : str
        ``own``, ``rival``, or ``ceiling``: what the machine can do at best, with no order in it or
        no data.
    unfit : str or None
        Why the arm cannot run here at all.
    """

    name: str
    make: Callable[[], Arm]
    sent_nbytes: int = 0
    against: tuple[str, ...] = ()
    kind: Kind = "own"
    unfit: str | None = None

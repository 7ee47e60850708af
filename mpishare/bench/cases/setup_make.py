"""One thing of case ``setup`` that is made again and again."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from mpishare.bench.measure import max_over_ranks
from mpishare.bench.rows import Row

if TYPE_CHECKING:
    from mpishare.bench.rows import Kind
    from mpishare.bench.session import Session


class Make:
    """One thing that is made again and again, and the seconds that it took."""

    name = ""
    nbytes = 0
    against: tuple[str, ...] = ()
    kind: Kind = "own"

    def __init__(self, session: Session, reason: str | None = None) -> None:
        self.session = session
        self.node = session.node
        self.reason = reason
        self.is_wrong = False
        self._samples_s: list[float] = []

    def make(self) -> Any:
        """Make it and return it. Collective."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Make what is there before it, untimed. Collective."""

    def tidy(self) -> None:
        """Close what `prepare` made. Collective."""

    def wrong(self, made: Any) -> int:
        """Return how many words of it are wrong."""
        raise NotImplementedError

    def free(self, made: Any) -> None:
        """Close it. Collective."""
        made.close()

    def once(self) -> None:
        """Make it once, timed, look at it and close it."""
        if self.reason is not None:
            return
        self.prepare()
        self.session.synchronize()
        self.session.comm.Barrier()
        before = perf_counter()
        made, self.reason = self.session.attempt(self.make)
        self._samples_s.append(perf_counter() - before)
        if made is not None and self.session.options.check:
            found = self.session.wrong_on(self.wrong(made))
            if found is not None:
                self.is_wrong, self.reason = True, f"wrong result: {self.name!r}: {found}"
        if made is not None:
            self.free(made)
        self.tidy()

    def close(self) -> None:
        """Free what all turns had in common. Collective."""

    def row(self) -> Row:
        """Return the row. Collective."""
        session = self.session
        row = Row(
            case="setup",
            arm=self.name,
            backend=self.node.backend,
            ranks=session.comm.size,
            nbytes=self.nbytes,
            clock="latency",
            kind=self.kind,
        )
        if self.reason is None:
            row.fill(max_over_ranks(session.comm, self._samples_s).tolist(), 0)
        else:
            row.fail(self.reason, wrong=self.is_wrong)
        return row

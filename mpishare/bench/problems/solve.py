"""Solve `Poisson` by conjugate gradients: a pass, the links of the ranks in it, and its repetition.

Every way does the same passes with the same kernels; they differ in their links, and in who repeats
the passes: the host by plain calls or by graphs of some passes, or a graph that holds the loop.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from mpishare.bench.comparison import Variant
from mpishare.bench.problems.exchange import Problem, Side

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.bench.measure import BlockSize
    from mpishare.bench.problems.poisson import Poisson
    from mpishare.bench.report.rows import Clock
    from mpishare.bench.session import Session

#: Of the residual, as part of the right-hand side.
TOLERANCE = 1e-8
#: A solve that takes more passes than that has failed.
MOST_PASSES = 5000
#: Passes between two looks of the host at the flag, where the loop is the host's.
PASSES = 50
#: Solves of a timed block.
_SOLVES = 2


class Links:
    """What the ranks tell each other in a pass; here nothing, as if each rank were alone."""

    def add_squares(self) -> None:
        """Add up r . r over the ranks."""

    def start(self) -> None:
        """Let the ghosts of the residual begin to travel."""

    def wait(self) -> None:
        """Return when the ghosts are there, or will be for what is put on the stream."""

    def add_product(self) -> None:
        """Add up p . q over the ranks."""

    def close(self) -> None:
        """Free what was made for it."""


class Ghosts(Problem):
    """The ghosts of the residual, for the baselines: faces across the axes that are cut.

    Those across the first axis are whole planes of memory: nothing has to pack them.
    """

    def __init__(self, session: Session, problem: Poisson) -> None:
        self.session, self.comm = session, problem.cart
        rows = problem.rows["r"]
        self.fields = [rows]
        self.check: Any = self  # the ghosts are right where the solution is
        owned = problem.owned_in_rows
        found: list[Side] = []
        for axis, ranks in enumerate(problem.cart.dims):
            if ranks == 1:
                continue
            low, high = problem.cart.Shift(axis, 1)
            begin, end = owned[axis].start, owned[axis].stop
            for to, source, out, into in (
                (low, high, begin, end),
                (high, low, end - 1, begin - 1),
            ):
                sent, ghosts = (
                    tuple(
                        slice(at, at + 1) if i == axis else slice(None) if axis == 0 else span
                        for i, span in enumerate(owned)
                    )
                    for at in (out, into)
                )
                found.append(Side(to, source, len(found), sent, ghosts))
        self.sides = tuple(found)

    def poison(self, fields: Sequence[Any]) -> None:
        """Leave the ghosts: each solve begins with zeros there."""


class Solve(Variant):
    """A solve: `advance` makes some passes, and is called until one of them is the last.

    The times are those of a pass.
    """

    is_calibrated = False

    def __init__(self, session: Session, problem: Poisson, links: Links) -> None:
        self.session, self.problem, self.links = session, problem, links
        #: Makes some passes, all of them if it can.
        self.advance: Callable[[], object] = self.passes

    def one_pass(self) -> None:
        """Put a pass on the stream."""
        problem, links = self.problem, self.links
        problem.descend()
        links.add_squares()
        links.start()
        problem.turn()
        links.wait()
        problem.multiply()
        links.add_product()

    def passes(self) -> None:
        """Make as many passes as the host makes between two looks."""
        for _ in range(PASSES if self.session.on_cuda else 1):
            self.one_pass()

    def step(self) -> None:
        """Solve."""
        problem = self.problem
        problem.begin(TOLERANCE)
        while True:
            self.advance()
            if problem.done[0] or problem.passes[0] > MOST_PASSES:  # waits for the GPU
                return

    def fill(self, token: int) -> None:
        """Set the right-hand side."""
        self.problem.pose(token)

    def poison(self) -> None:
        """Overwrite the solution."""
        self.problem.forget()

    def verify(self, token: int) -> None:  # noqa: ARG002
        """Compare the solution."""
        self.problem.verify()

    def wrong(self) -> int:
        """Return how many cells were wrong."""
        return self.problem.wrong()

    def time_block(self, session: Session, clock: Clock, size: BlockSize) -> list[float]:  # noqa: ARG002
        """Solve some times, and return the time of a pass in each."""
        samples_s = []
        for _ in range(session.options.iters or _SOLVES):
            session.line_up()
            begin = perf_counter()
            self.step()
            session.synchronize()
            samples_s.append((perf_counter() - begin) / int(self.problem.passes[0]))
        return samples_s

    def close(self) -> None:
        """Free the links, once nothing uses them."""
        self.session.synchronize()
        self.advance = self.passes
        self.links.close()

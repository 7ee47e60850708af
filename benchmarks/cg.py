"""``cg``: Poisson's equation in a box by conjugate gradients; the times are those of a pass.

A pass is three kernels, the exchange of the ghosts of one field, and two sums over the ranks. All
variants and baselines run the same kernels and solve the same problem to the same tolerance; every
solution is compared with the one from which the right-hand side was made. ``kernels`` is the lower
bound: the kernels alone, where each rank solves in its own block as if it were the whole box.

``one graph`` is one launch per solve, since the graph holds the loop and its end. ``graph`` is a
graph of some passes, which the host launches again until one was the last, and ``calls`` launches
kernel by kernel. ``calls, dot`` adds up both products by `Allreduce.dot` instead of in the kernels.
Calls of NCCL can be in a graph, but in no loop of one, as they bring nodes of events (NCCL 2.28).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mpi4py import MPI

import mpishare
from benchmarks.catalog import UPPER_BOUNDS
from benchmarks.links import Links, mpishare_links, nccl_links, staged_links
from mpishare.bench.cases import Case
from mpishare.bench.comparison import Comparison, Variant
from mpishare.bench.library import capture, open_library
from mpishare.bench.measure import time_batches
from mpishare.bench.report import UPPER_BOUND, Clock
from mpishare.bench.session import Bound, Session, do_nothing, in_turn
from scripts.applications.poisson import Poisson, poisson

#: Of the residual, as part of the right-hand side.
TOLERANCE = 1e-8
#: A solve that takes more passes than that has failed.
MOST_PASSES = 5000
#: Passes between two looks of the host at the flag, where the loop is the host's.
PASSES = 50
#: Solves of a timed block.
_SOLVES = 2


class Solve(Variant):
    """A solve: `advance` makes some passes, and is called until one of them is the last."""

    is_calibrated = False

    def __init__(
        self,
        session: Session,
        problem: Poisson,
        links: Links,
        by: Callable[..., Bound] | None = None,
    ) -> None:
        self.session, self.problem, self.links = session, problem, links
        self.check = problem
        self.advance, self._free = by(self) if by else (self.passes, do_nothing)

    def one_pass(self) -> None:
        problem, links = self.problem, self.links
        problem.descend()
        links.add_squares()
        links.start()
        problem.turn()
        links.wait()
        problem.multiply()
        links.add_product()

    def passes(self) -> None:
        for _ in range(PASSES if self.session.on_cuda else 1):
            self.one_pass()

    def step(self) -> None:
        problem = self.problem
        problem.begin(TOLERANCE)
        while True:
            self.advance()
            if problem.done[0] or problem.passes[0] > MOST_PASSES:  # waits for the GPU
                return

    def fill(self, token: int) -> None:
        self.problem.pose(token)

    def poison(self) -> None:
        self.problem.forget()

    def verify(self, token: int) -> None:  # noqa: ARG002
        self.problem.verify()

    def time_block(self, session: Session, clock: Clock, iters: int) -> list[float]:  # noqa: ARG002
        samples_s = []
        for _ in range(session.options.iters or _SOLVES):
            session.line_up()
            (solve_s,) = time_batches(self.step, session.synchronize, 1)
            samples_s.append(solve_s / int(self.problem.passes[0]))
        return samples_s

    def close(self) -> None:
        self._free()
        del self.advance, self._free
        self.links.close()


#: A loop of a graph takes some microseconds to ask for its end; passes beyond it do no harm.
_PASSES_PER_LOOK = 4


def run(session: Session, case: Case) -> None:
    def of_size(nbytes: int) -> tuple[tuple[int, ...], int, int]:
        shape = (max(round((nbytes / 8) ** 0.5), 2),) * 3
        return shape, nbytes, 2 * Poisson.needed_nbytes(shape)

    for shape in session.blocks(case, of_size):
        _run(session, case, shape)


def _run(session: Session, case: Case, shape: tuple[int, ...]) -> None:
    comm, node = session.comm, session.node
    cart = comm.Create_cart(MPI.Compute_dims(comm.size, 3), reorder=False)
    problem, unfit = session.attempt(lambda: poisson(node, cart, shape))
    comparison = Comparison(
        session, case, nbytes=8 * shape[0] ** 2, unfit=unfit, clocks=("throughput",)
    )
    if problem is not None:
        solve, links = partial(Solve, session, problem), partial(mpishare_links, problem)
        comparison.add("calls", lambda: solve(links()))
        comparison.add("calls, dot", lambda: solve(links(by_dot=True)))
        if session.on_cuda:
            comparison.add("graph", lambda: solve(links(), in_graphs))
            comparison.add("one graph", lambda: solve(links(), in_one_graph))
        _add_baselines(comparison, session, problem)
        if session.on_cuda and comparison.includes(UPPER_BOUNDS):
            comparison.add("kernels", partial(_kernels, session, shape), kind=UPPER_BOUND)
    comparison.run()
    if problem is not None:
        problem.close()
    cart.Free()


def _add_baselines(comparison: Comparison, session: Session, problem: Poisson) -> None:
    refusal = "one rank: there is nothing to exchange" if session.comm.size == 1 else None

    def add(name: str, links: Callable[..., Links], unfit: str | None = refusal) -> None:
        def make() -> Solve:
            by = in_graphs if "graph" in name else None
            return Solve(session, problem, links(session, problem), by)

        comparison.add_baseline(name.split()[0], make, name, unfit=unfit)

    add("staged", staged_links)
    if comparison.includes("nccl"):
        from mpishare.bench.nccl import Nccl

        library, reason = (None, refusal) if refusal else open_library(session, Nccl)
        for name in ("nccl", "nccl graph"):
            add(name, partial(nccl_links, library=library), reason)


def in_graphs(solve: Solve) -> Bound:
    """Bind the passes of a solve in a graph of some of them."""
    solve.problem.begin(0.0)
    graph = capture(solve.session, solve.passes)
    return partial(graph.launch, solve.session.stream), do_nothing


def in_one_graph(solve: Solve) -> Bound:
    """Bind a solve in a graph that holds the loop."""
    problem = solve.problem

    def some_passes() -> None:
        for _ in range(_PASSES_PER_LOOK):
            solve.one_pass()

    at_most = MOST_PASSES // _PASSES_PER_LOOK
    graph = mpishare.capture(problem.node, some_passes, until=lambda: problem.done, at_most=at_most)
    return graph, graph.close


def _kernels(session: Session, shape: tuple[int, ...]) -> Solve:
    """Return a solve by the kernels alone, in a problem of this rank's own."""
    cart = MPI.COMM_SELF.Create_cart([1] * 3)
    problem = poisson(session.node, cart, shape)
    return Solve(session, problem, Links(close=in_turn(problem.close, cart.Free)), in_graphs)

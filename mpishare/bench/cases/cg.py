"""``cg``: Poisson's equation in a box by conjugate gradients; the times are those of a pass.

A pass is three kernels, the exchange of the ghosts of one field, and two sums over the ranks. All
variants and baselines run the same kernels and solve the same problem to the same tolerance; every
solution is compared with the one from which the right-hand side was made. ``kernels`` is the lower
bound: the kernels alone, where each rank solves in its own block as if it were the whole box.

``one graph`` is one launch per solve, since the graph holds the loop and its end. ``graph`` is a
graph of some passes, which the host launches again until one was the last, and ``calls`` launches
kernel by kernel. ``calls, dot`` adds up both products by `Allreduce.dot` instead of in the kernels.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

import mpishare
from mpishare.bench.baselines.library import open_library
from mpishare.bench.cases import UPPER_BOUNDS
from mpishare.bench.comparison import Comparison
from mpishare.bench.problems.poisson import Poisson, poisson
from mpishare.bench.problems.solve import MOST_PASSES, Links, Solve
from mpishare.bench.report.rows import BASELINE, UPPER_BOUND
from mpishare.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.bench.cases import Case
    from mpishare.bench.report.rows import Row
    from mpishare.bench.session import Session


def run(session: Session, case: Case) -> list[Row]:
    """Run the case and return its rows. Collective, host-blocking."""
    rows: list[Row] = []
    for nbytes in session.options.sizes(session.node.backend, case.name):
        shape = (max(round((nbytes / 8) ** 0.5), 2),) * 3
        if session.fits(case, nbytes, 2 * Poisson.needed_nbytes(shape)):
            rows += _run(session, case, shape)
    return rows


def _run(session: Session, case: Case, shape: tuple[int, ...]) -> list[Row]:
    comm, node = session.comm, session.node
    cart = comm.Create_cart(MPI.Compute_dims(comm.size, 3), reorder=False)
    problem, unfit = session.attempt(lambda: poisson(node, cart, shape))
    comparison = Comparison(
        session, case, nbytes=8 * shape[0] ** 2, unfit=unfit, clocks=("throughput",)
    )
    if problem is not None:
        solve = partial(Solve, session, problem)
        comparison.add("calls", lambda: solve(MpishareLinks(problem)))
        comparison.add("calls, dot", lambda: solve(MpishareLinks(problem, by_dot=True)))
        if session.on_cuda:
            comparison.add("graph", lambda: InGraphs(solve(MpishareLinks(problem))))
            comparison.add("one graph", lambda: InOneGraph(solve(MpishareLinks(problem))))
        _add_baselines(comparison, session, problem)
        if session.on_cuda and comparison.includes(UPPER_BOUNDS):
            comparison.add("kernels", partial(_Kernels, session, shape), kind=UPPER_BOUND)
    rows = comparison.run()
    if problem is not None:
        problem.close()
    cart.Free()
    return rows

"""Conjugate gradients: right on every count of ranks, and wrong where they must be."""

import math

import pytest

from tests.applications.programs import beginning, require_seen, right_rows, rows_of
from tests.helpers.launch import run_right

BEGINNING = beginning("cg", "common")

# Blocks whose rows have an even and an odd number of cells, cut along every axis.
EVERY = f"""{BEGINNING}
size = sys.argv[1]
for n, dims in ("8", [size, "1", "1"]), ("7", ["1", size, "1"]), ("9", ["1", "1", size]):
    report({{"status": run("--n", n, "--dims", *dims)}})
report({{"status": run("--n", "12", "--tolerance", "1e-12")}})
"""

# Ghosts that never come; and sums of either product that are wrong, the same on every rank.
BROKEN = f"""{BEGINNING}
class Deaf(mpishare.HaloExchange):
    start = wait = lambda self, *fields, stream=None: None

class Wrong(mpishare.Allreduce):
    calls, wrong = 0, None

    def reduce(self, x, stream=None):
        super().reduce(x, stream=stream)
        self.calls += 1
        if self.calls % 2 == self.wrong:
            x *= 0.9

class Squares(Wrong):
    wrong = 1

class Product(Wrong):
    wrong = 0

cg.AT_MOST = 60  # it takes 47
halo, total = mpishare.HaloExchange, mpishare.Allreduce
for broken in (Deaf, Squares, Product):
    if broken is Deaf:
        mpishare.HaloExchange = broken
    else:
        mpishare.HaloExchange, mpishare.Allreduce = halo, broken
    report({{broken.__name__: run("--n", "8")}})
mpishare.Allreduce = total
report({{"whole": run("--n", "8")}})
"""

# One launch of a graph and two words that are set: what a solve takes once the graph is made.
LAUNCHES = f"""{BEGINNING}
import argparse
from mpi4py import MPI
from mpishare.graphs import cuda

launch, launched = cuda.launch_graph, []
def counting(*words):
    launched.append(words)
    launch(*words)
cuda.launch_graph = counting
args = argparse.Namespace(shape=(24, 24, 24), tolerance=1e-8, exact=False)
cart = MPI.COMM_WORLD.Create_cart(MPI.Compute_dims(MPI.COMM_WORLD.size, 3))
with mpishare.Node() as node, common.stream(node):
    solver = cg.Solver(args, cart, node)
    for token in range(3):
        solver.local.pose(token)
        launched.clear()
        solver.solve()
        node.synchronize()
        report({{token: [len(launched), int(solver.local.passes[0]), solver.is_captured]}})
        solver.local.verify()
        report({{"wrong": solver.local.wrong()}})
    solver.close()
"""


ON_GPUS = [pytest.mark.gpu, pytest.mark.timeout(130)]


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [("host", n) for n in (1, 2, 3, 4)]
    + [pytest.param("cuda", n, marks=ON_GPUS) for n in (1, 2, 4)],
)
def test_it_is_right(backend: str, ranks: int) -> None:
    rows = right_rows("cg", ranks, backend, EVERY, [str(ranks)])
    assert len(rows) == 4
    for row in rows:
        assert row["iteration_us"] > 0
        assert row["in_one_graph"] is False or backend == "cuda"


EXACT = f"""{BEGINNING}
for dims in sys.argv[1:]:
    run("--cells", "12", "--exact", "--dims", *dims.split())
"""


def exact_residuals(backend: str, dims: tuple[str, ...]) -> set[tuple[int, str]]:
    """The iterations, and a hash of the last residual, of one box in several partitions."""
    ranks = math.prod(map(int, dims[0].split()))
    result = run_right(ranks, EXACT, [*dims], env={"MPISHARE_BACKEND": backend})
    rows = rows_of(result)
    assert len(rows) == len(dims)
    return {(row["iterations"], row["residual"]) for row in rows}


@pytest.fixture(scope="module")
def alone() -> set[tuple[int, str]]:
    return exact_residuals("host", ("1 1 1",))


@pytest.mark.parametrize(
    ("backend", "dims"),
    [("host", ("2 1 1", "1 1 2")), ("host", ("3 1 1",)), ("host", ("2 2 1",))]
    + [pytest.param("cuda", (each,), marks=ON_GPUS) for each in ("1 1 1", "1 2 1", "4 1 1")],
)
def test_exact_residuals_have_the_same_bits_everywhere(backend, dims, alone) -> None:
    """As one rank on the host has them."""
    assert exact_residuals(backend, dims) == alone


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_solve_is_one_launch_of_a_graph(ranks: int) -> None:
    result = run_right(ranks, LAUNCHES, env={"MPISHARE_BACKEND": "cuda"})
    for told in result.reports.values():
        passes = {told[str(token)][1] for token in range(3)}
        assert min(passes) > 20
        # Ranks that share a GPU without MPS have no loop in a graph.
        is_one = told["0"][2]
        assert is_one or ranks > 1
        assert [told[str(token)][0] for token in range(3)] == [int(is_one)] * 3
        assert told["wrong"] == 0


def test_what_is_broken_is_seen() -> None:
    result = require_seen(BROKEN, "Deaf", "Squares", "Product")
    assert "cg: WRONG: " in result.stderr

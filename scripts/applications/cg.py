"""Poisson's equation in a box by conjugate gradients, the whole solve in one launch.

The 7-point Laplacian in float64, zero outside of the box. An iteration is three kernels, the
exchange of one field and two sums over the ranks; its scalars stay on the GPU, and so does the test
that ends the solve: `mpishare.capture` makes the loop a part of the graph. Without a GPU the same
program runs on NumPy. With `--exact` both sums are exact dot products: the residuals have the same
bits on any number of ranks, on GPUs and on hosts, and a hash of them is printed.
`python -m benchmarks cg` times the same solve beside NCCL and staged MPI.

    mpirun -n 4 python scripts/applications/cg.py --n 32 --check
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import common
import numpy as np
import outcome
import timing
from poisson import poisson

import mpishare

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from mpi4py import MPI

AT_MOST = 100_000  # iterations
PER_LOOK = 4  # iterations on a GPU between two looks at the flag; further ones do no harm


class Solver:
    """The box, cut into one block per rank."""

    def __init__(self, args: argparse.Namespace, cart: MPI.Cartcomm, node: mpishare.Node) -> None:
        self.tolerance = args.tolerance
        # The kernels on a rank's own block.
        self.local = local = poisson(node, cart, args.shape, may_fuse=not args.exact)
        self.halo = mpishare.HaloExchange(cart, local.r, width=1, node=node)
        self.is_exact = args.exact
        self.total = mpishare.Allreduce(cart, local.rr, exact=args.exact, node=node)
        # In a loop of a graph nothing can be captured that needs the host, or waits of streams.
        routes = {route for each in cart.allgather(self.halo.routes) for route in each.values()}
        self.is_captured = routes <= {"fused", "host", "nccl"}
        # With exact sums as many iterations on hosts as on GPUs.
        self.per_look = 1 if local.xp is np and not args.exact else PER_LOOK
        at_most, flag = AT_MOST // self.per_look, local.done
        self.loop = mpishare.capture(node, self.iterate, until=lambda: flag, at_most=at_most)

    def solve(self) -> None:
        """Set `x` to the solution."""
        self.local.begin(self.tolerance)
        if self.is_captured:
            self.loop()
            return
        for _ in range(AT_MOST // self.per_look):
            self.iterate()
            if int(self.local.done[0]):
                return

    def iterate(self) -> None:
        """Make as many iterations as are made between two looks at the flag."""
        for _ in range(self.per_look):
            self.iterate_once()

    def iterate_once(self) -> None:
        """Make one iteration; the ghosts of the residual travel beside a kernel."""
        local = self.local
        local.descend()  # r -= alpha q, rr = r . r of this rank
        self.add_up(local.rr, local.r, local.r)  # total.reduce(local.rr)
        self.halo.start(local.r)
        local.turn()  # x += alpha p, p = r + beta p, done = whether |r| is small enough
        self.halo.wait()
        local.multiply()  # the same p in the ghosts, q = A p, pq = p . q of this rank
        self.add_up(local.pq, local.p, local.q)

    def add_up(self, of_rank: Any, x: Any, y: Any) -> None:
        """Replace this rank's product of two fields by that of all ranks."""
        if self.is_exact:
            owned = self.local.owned
            self.total.dot(x[owned], y[owned], out=of_rank)
        else:
            self.total.reduce(of_rank)

    def close(self) -> None:
        """Close what was made. Collective."""
        self.loop.close()
        self.total.close()
        self.halo.close()
        self.local.close()


def reference(b: np.ndarray) -> np.ndarray:
    """Return the solution from one process that has the whole box: by sine waves, exactly.

    They are the eigenvectors of the matrix, which is a sum of one part along each axis.
    """
    values: Any = 0.0
    waves = []
    for axis, n in enumerate(b.shape):
        k = np.arange(1, n + 1)
        waves.append(np.sqrt(2 / (n + 1)) * np.sin(np.pi * np.outer(k, k) / (n + 1)))
        along = [1, 1, 1]
        along[axis] = n
        values = values + (2 - 2 * np.cos(np.pi * k / (n + 1))).reshape(along)

    def transform(field: np.ndarray) -> np.ndarray:
        for axis, wave in enumerate(waves):
            field = np.moveaxis(np.tensordot(wave, field, (1, axis)), 0, axis)
        return field

    return transform(transform(b) / values)


def check(x: np.ndarray, b: np.ndarray, tolerance: float) -> list[str]:
    """Return what is wrong, as lines."""
    right = reference(b)
    # The error is that of the residual times the inverse of the smallest eigenvalue, at most.
    smallest = sum(2 - 2 * np.cos(np.pi / (n + 1)) for n in b.shape)
    allowed = max(tolerance, 1e-14) * np.linalg.norm(b) / smallest
    error = np.linalg.norm(x - right)
    if error <= allowed:
        return []
    return [f"x differs from the solution by {error:g}; allowed is {allowed:g}"]


def run(args: argparse.Namespace, cart: MPI.Cartcomm, node: mpishare.Node) -> int:
    """Solve, check and draw; return the exit status. Collective."""
    solver = Solver(args, cart, node)
    local = solver.local
    local.pose(0)
    solver.solve()  # which makes the graph
    solve_us = timing.alone_us(node, cart, {"solve": solver.solve}, 1)["solve"]
    iterations = int(local.passes[0])
    fields = local.x, local.b, local.r
    x, b, r = (outcome.gather(cart, field[local.owned]) for field in fields)
    wrong: list[str] = []
    is_one = node.backend == "cuda" and solver.is_captured
    found: dict[str, Any] = {"iterations": iterations, "solve_us": solve_us}
    found |= {"in_one_graph": is_one, "iteration_us": solve_us / iterations}
    text = (
        f"{iterations} iterations in {solve_us / 1e3:.2f} ms, {found['iteration_us']:.1f} us each"
    )
    if x is not None and b is not None and r is not None:
        found["residual"] = hashlib.sha256(r.tobytes()).hexdigest()[:16]
        text += f", residual {found['residual']}" * args.exact
        if not int(local.done[0]):
            wrong.append(f"not solved after {iterations} iterations")
        if args.check:
            wrong += check(x, b, args.tolerance)
    solver.close()
    form = "one graph" if is_one else "launch by launch"
    return outcome.tell("cg", args, node, cart, wrong, found, text, form)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the application; the exit status is 1 where the check fails."""
    parser = common.grid_parser(__doc__, n=64)
    parser.add_argument(
        "--tolerance", type=float, default=1e-8, help="of the residual, relative (1e-8)"
    )
    parser.add_argument("--exact", action="store_true", help="sums that no partition changes")
    args, cart = common.parse(parser, arguments, [False] * 3)
    with mpishare.Node() as node, common.stream(node):
        return run(args, cart, node)


if __name__ == "__main__":
    common.run(main)

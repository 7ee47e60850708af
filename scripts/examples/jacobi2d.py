"""Laplace's equation on a rectangle by Jacobi's method.

The problem of NVIDIA's multi-gpu-programming-models: float32, periodic in y, the left and the right
column held at one period of a sine, zero inside, and the norm of the change every so many steps.

    mpirun -n 4 python scripts/examples/jacobi2d.py --n 128 --steps 3000 --check --plot jacobi2d.png
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import boxes
import common
import numpy as np
import outcome
import picture
import staged
import timing

import mpishare

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

QUARTER = np.float32(0.25)


class Jacobi:
    """The rectangle, cut into one block a rank: axis 0 is y, axis 1 is x."""

    def __init__(self, args: argparse.Namespace, cart: MPI.Cartcomm, node: mpishare.Node) -> None:
        self.args, self.cart, self.node, self.xp = args, cart, node, node.xp
        shape = (args.n + 2, args.n + 2)
        u, v = (node.allocate_each(shape, np.float32, fill=0).array for _ in range(2))
        self.u, self.v = u, v
        self.halo = self.make_halo(args.staged)
        self.cells = boxes.Boxes(self.xp, shape, [self.halo.owned])
        self.relax_kernel, self.squares_kernel = boxes.kernels(
            self.xp, "jacobi2d", "relax", "add_squares"
        )
        self.sum = self.xp.zeros(1)
        self.norm = math.nan

    def make_halo(self, form: str | None) -> Any:
        """Make the exchange: by mpishare, or staged. Collective."""
        cart, u, node, xp = self.cart, self.u, self.node, self.xp
        if form == "naive":
            return staged.Naive(cart, u, xp)
        if form == "pinned":
            return staged.Pinned(cart, u, xp)
        return mpishare.HaloExchange(cart, u, width=1, node=node)

    def begin(self) -> None:
        """Set both fields to the initial values; in the outermost columns they stay."""
        edge = common.my_part(self.cart, 0, boundary(self.args.n * self.cart.dims[0]))
        block = np.zeros(self.u.shape, np.float32)
        for column, is_outermost in (
            (0, self.cart.coords[1] == 0),
            (-1, self.cart.coords[1] == self.cart.dims[1] - 1),
        ):
            if is_outermost:
                block[1:-1, column] = edge
        for u in (self.u, self.v):
            u[...] = self.xp.asarray(block)
        self.node.synchronize()

    def step(self, number: int) -> None:
        """Relax every cell once."""
        self.halo.exchange(self.u)
        self.relax(self.u, self.v)
        if number % self.args.norm_every == 0 or number == self.args.steps:
            self.norm = math.sqrt(self.cart.allreduce(self.squares(self.u, self.v)))
        self.u, self.v = self.v, self.u

    def actions(self, halo: Any) -> dict[str, Callable[[], None]]:
        """Return what is timed of an exchange: by itself, and in a step."""

        def step() -> None:
            self.halo = halo
            self.step(1)

        return {"exchange": lambda: halo.exchange(self.u), "step": step}

    def relax(self, u: Any, v: Any) -> None:
        """Set every cell of `v` to the mean of its four neighbors in `u`."""
        if self.relax_kernel:
            self.cells.launch(self.relax_kernel, (u, v))
            return
        for box in self.cells:
            new = v[box]
            np.add(u[boxes.shifted(box, 0, -1)], u[boxes.shifted(box, 0, 1)], out=new)
            new += u[boxes.shifted(box, 1, -1)]
            new += u[boxes.shifted(box, 1, 1)]
            new *= QUARTER

    def squares(self, u: Any, v: Any) -> float:
        """Return the sum of the squares of the changes of my cells; the host waits for it."""
        if self.squares_kernel:
            self.sum.fill(0)
            self.cells.launch(self.squares_kernel, (u, v), self.sum)
            return float(self.sum[0])
        return sum(float(np.square(v[b] - u[b], dtype=np.float64).sum()) for b in self.cells)


def boundary(ny: int) -> np.ndarray:
    """Return the values of the left and the right column.

    NVIDIA's rows 0 and last are its halo: so the first of the rest is row 1 of ``ny + 2``.
    """
    return np.sin(2 * np.pi * np.arange(1, ny + 1) / (ny + 1)).astype(np.float32)


def reference(ny: int, nx: int, args: argparse.Namespace) -> tuple[np.ndarray, float]:
    """Return the result and the last norm, from one process that has the whole rectangle."""
    u = np.zeros((ny, nx + 2), np.float32)
    u[:, 0] = u[:, -1] = boundary(ny)
    norm = math.nan
    for number in range(1, args.steps + 1):
        v = u.copy()
        vertical = (np.roll(u, 1, axis=0) + np.roll(u, -1, axis=0))[:, 1:-1]
        v[:, 1:-1] = (vertical + u[:, :-2] + u[:, 2:]) * QUARTER
        if number == args.steps:
            norm = math.sqrt(np.square(v - u, dtype=np.float64).sum())
        u = v
    return u[:, 1:-1], norm


def check(whole: np.ndarray, norm: float, args: argparse.Namespace, backend: str) -> list[str]:
    """Return what is wrong, as lines."""
    right, right_norm = reference(whole.shape[0], whole.shape[1], args)
    wrong = outcome.compare(backend, "u", whole, right)
    # The squares are added in another order.
    if not math.isclose(norm, right_norm, rel_tol=1e-6):
        wrong.append(f"norm: {norm!r} instead of {right_norm!r}")
    return wrong


def solve(args: argparse.Namespace, cart: MPI.Cartcomm, node: mpishare.Node) -> int:
    """Run, check and draw; return the exit status. Collective."""
    jacobi = Jacobi(args, cart, node)
    jacobi.begin()
    # A kernel is loaded at its first use, and that must not wait for an exchange.
    jacobi.relax(jacobi.u, jacobi.v)
    jacobi.squares(jacobi.u, jacobi.v)
    for number in range(3):
        jacobi.step(number)
    jacobi.begin()
    step_us = timing.steps_us(node, cart, args.steps, jacobi.step)
    norm, whole = jacobi.norm, None
    if args.check or args.plot:
        whole = outcome.gather(cart, jacobi.u[jacobi.halo.owned])
    calls = min(args.steps, 100)
    exchange_us = timing.alone_us(node, cart, jacobi.actions(jacobi.halo), calls)["exchange"]
    result = outcome.Outcome("jacobi2d", args, node, cart, step_us, exchange_us)
    result.facts["norm"] = norm
    if args.compare:
        result.facts |= timing.compare_forms(node, cart, jacobi.make_halo, jacobi.actions, calls)
    if whole is not None and args.check:
        result.wrong = check(whole, norm, args, node.backend)
    if whole is not None and args.plot:
        draw(whole, args, cart)
    return result.tell()


def draw(whole: np.ndarray, args: argparse.Namespace, cart: MPI.Cartcomm) -> None:
    """Draw the field on rank 0."""
    panel = picture.Panel(
        whole, "u", "RdBu_r", (0, 1), (-1.0, 1.0), contours=[k / 10 for k in range(-9, 10) if k]
    )
    title = f"Laplace by Jacobi: {args.steps} steps on {whole.shape[0]} x {whole.shape[1]} cells"
    picture.draw(args.plot, title, cart, [panel])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; the exit status is 1 where the check fails."""
    parser = common.parser(__doc__, n=512, steps=500)
    parser.add_argument(
        "--norm-every",
        type=common.count,
        default=100,
        metavar="STEPS",
        help="steps from one norm to the next (100)",
    )
    args = common.parse(parser, arguments)
    cart = common.make_grid([True, False])
    with mpishare.Node() as node, common.stream(node):
        return solve(args, cart, node)


if __name__ == "__main__":
    common.run(main)

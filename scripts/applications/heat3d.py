"""Heat in a periodic box, with the exchange hidden behind the interior.

The 7-point explicit scheme in float64, six faces a rank. A step updates the cells that neighbors
need, and exchanges them beside the update of the others; it is timed against a step that exchanges
first and then updates everything, and against its parts. `--order` names other orders. With
`--wrap` the update finds the neighbors along an axis that no rank cuts by itself, so that neither
an exchange nor the order of a step has to do with its faces, which lie across all lines of memory.

    mpirun -n 4 python scripts/applications/heat3d.py --n 64 --steps 200 --check
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import boxes
import common
import numpy as np
import orders
import outcome
import staged

import mpishare

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

SHARE = 0.125  # of a cell's heat that goes to each neighbor in a step: alpha dt / dx^2
KEEP = 1 - 6 * SHARE
MARCH = 8  # planes that a thread of the GPU goes through
# Bumps of heat: their centre as parts of the axes, and their height.
BUMPS = (((0.3, 0.35, 0.4), 1.0), ((0.7, 0.6, 0.45), 0.8), ((0.45, 0.75, 0.7), 0.6))


class Heat(orders.Steps):
    """The box, cut into one block a rank."""

    def __init__(self, args: argparse.Namespace, cart: MPI.Cartcomm, node: mpishare.Node) -> None:
        self.name, self.every = "heat3d", args.steps
        self.args, self.cart, self.node, self.xp = args, cart, node, node.xp
        shape = tuple(n + 2 for n in args.shape)
        self.wrapped = args.shape[-1] if args.wrap else 0
        self.window, (self.u, self.v) = boxes.fields(node, shape, np.float64)
        super().__init__(args, node, self.u, self.v, self.make_halo(args.staged), group=2)
        (self.kernel,) = boxes.kernels(self.xp, "heat3d", "spread")
        self.scratch = np.empty(shape) if self.xp is np else None

    def make_halo(self, form: str | None) -> Any:
        """Make the exchange: by mpishare, or staged. Collective."""
        cart, u, node, xp = self.cart, self.u, self.node, self.xp
        if form:
            return staged.FORMS[form](cart, u, xp)
        if self.wrapped:
            planes = cart.Sub([True, True, False])
            return mpishare.HaloExchange(planes, u, width=1, axes=(0, 1), node=node)
        return mpishare.HaloExchange(cart, u, width=1, node=node)

    def parts(self, halo: Any) -> tuple[boxes.Box, boxes.Box]:
        """Return all owned cells, and those that need no exchange: whole rows, if they wrap."""
        owned, interior = halo.owned, halo.interior
        if self.wrapped:
            row = slice(1, 1 + self.wrapped)
            return (*owned[:2], row), (*interior[:2], row)
        return owned, interior

    def wrap(self, u: Any, box: boxes.Box) -> None:
        """Bring the ghosts of these rows up to date from their other ends, for NumPy."""
        rows = u[box[:2]]
        rows[..., 0], rows[..., self.wrapped + 1] = rows[..., self.wrapped], rows[..., 1]

    def begin(self) -> None:
        """Set the owned cells to the initial values."""
        cells = np.multiply(self.args.shape, self.cart.dims).tolist()
        self.u, self.v = self.fields
        self.u[self.mine] = initial(cells, self.cart, self.xp)
        if self.wrapped and self.scratch is not None:
            self.wrap(self.u, self.mine)
        super().begin()

    def parts_of_a_step(self) -> dict[str, Callable[[], None]]:
        """Return what is timed beside the exchange."""
        return {
            "interior": functools.partial(self.update, self.interior),
            "shell": functools.partial(self.update, self.shell),
        }

    def facts(self, times: dict[str, float]) -> dict[str, float]:
        """Return how well the exchange is hidden, in these times of the parts."""
        interior, shell, exchange = (times[name] for name in ("interior", "shell", "exchange"))
        found = {"interior_us": interior, "shell_us": shell}
        if self.args.order != "plain":
            found |= {
                "step_with_overlap_us": times["step"],
                "step_without_overlap_us": times["step_without_overlap"],
                "step_with_overlap_to_best": times["step"] / (max(interior, exchange) + shell),
            }
        return found

    def actions(self, halo: Any) -> dict[str, Callable[[], None]]:
        """Return what is timed of an exchange: by itself, and in both kinds of steps."""
        found = super().actions(halo)
        if self.args.order != "plain":
            found["step_without_overlap"] = functools.partial(self.step_with, halo, "plain")
        return found

    def update(self, cells: boxes.Boxes) -> None:
        """Set the cells of `v` in these boxes of cells."""
        u, v = self.u, self.v
        if self.scratch is None:
            scalars = np.float64(KEEP), np.float64(SHARE), np.int32(self.wrapped)
            cells.launch(self.kernel, (u, v), *scalars)
            return
        for box in cells:
            new, kept = v[box], self.scratch[box]
            np.add(u[boxes.shifted(box, 0, -1)], u[boxes.shifted(box, 0, 1)], out=new)
            for axis in (1, 2):
                new += u[boxes.shifted(box, axis, -1)]
                new += u[boxes.shifted(box, axis, 1)]
            new *= SHARE
            np.multiply(u[box], KEEP, out=kept)
            new += kept
            if self.wrapped:
                self.wrap(v, box)


def initial(cells: Sequence[int], cart: MPI.Cartcomm | None = None, xp: Any = np) -> Any:
    """Return the initial heat of this rank's cells, or of all where there is no grid."""

    def part(axis: int, profile: np.ndarray) -> Any:
        return xp.asarray(profile if cart is None else common.my_part(cart, axis, profile))

    width = min(cells) / 7
    total: Any = 0.0
    for centre, height in BUMPS:
        x, y, z = (
            part(axis, common.bump(n, where, width))
            for axis, (n, where) in enumerate(zip(cells, centre, strict=True))
        )
        total = total + height * (x[:, None, None] * y[None, :, None] * z[None, None, :])
    return total


def reference(cells: Sequence[int], steps: int) -> np.ndarray:
    """Return the result from one process that has the whole box."""
    u = initial(cells)
    for _ in range(steps):
        total = np.roll(u, 1, 0) + np.roll(u, -1, 0)
        for axis in (1, 2):
            total = total + np.roll(u, 1, axis) + np.roll(u, -1, axis)
        u = SHARE * total + KEEP * u
    return u


def slowest_mode(cells: Sequence[int]) -> tuple[np.ndarray, float]:
    """Return a wave of one period along every axis, and what a step multiplies it by, exactly."""
    waves = [np.cos(2 * np.pi * np.arange(n) / n) for n in cells]
    wave = waves[0][:, None, None] * waves[1][None, :, None] * waves[2][None, None, :]
    return wave, KEEP + 2 * SHARE * sum(np.cos(2 * np.pi / n) for n in cells)


def check(whole: np.ndarray, heat: Heat) -> list[str]:
    """Return what is wrong, as lines."""
    steps = heat.args.steps
    wrong = outcome.compare(heat.node.backend, "u", whole, reference(whole.shape, steps))
    wave, factor = slowest_mode(whole.shape)
    before = initial(whole.shape)
    amplitude, right = np.vdot(wave, whole), np.vdot(wave, before) * factor**steps
    if not abs(amplitude - right) <= 1e-12 * np.abs(before).sum():
        wrong.append(f"the slowest wave has decayed to {amplitude!r} instead of {right!r}")
    total, right = whole.sum(), before.sum()
    if not abs(total - right) <= 1e-12 * right:
        wrong.append(f"there is {total!r} heat instead of {right!r}")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the application; the exit status is 1 where the check fails."""
    parser = common.parser(__doc__, n=64, steps=500)
    common.add_orders(parser, said="beside; plain where ranks share a GPU")
    parser.add_argument(
        "--wrap", action="store_true", help="the update goes round the last axis itself"
    )
    args, cart = common.parse(parser, arguments, [True, True, True])
    if args.wrap and (cart.dims[-1] > 1 or args.staged or args.compare):
        parser.error("--wrap: for one rank along the last axis, and neither --staged nor --compare")
    args.march = MARCH
    with mpishare.Node() as node, common.stream(node):
        args.order = args.order or common.order_for(node, "beside")
        return common.solve(Heat(args, cart, node), check)


if __name__ == "__main__":
    common.run(main)

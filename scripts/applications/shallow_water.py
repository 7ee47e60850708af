"""A drop in shallow water: three fields that travel together, corners too.

Depth and momentum on a periodic rectangle in float64, by the two-step scheme of Lax and Wendroff:
half a step to where four cells meet, so that a cell needs all eight around it. Mass is conserved.

    mpirun -n 4 python scripts/applications/shallow_water.py --n 96 --steps 150 --check --plot h.png
"""

from __future__ import annotations

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

    Water = tuple[Any, Any, Any]  # the depth, and the momentum along x and y

RATIO = 0.4  # dt / dx, where gravity and the depth at rest are 1
DROPS = (((0.35, 0.4), 0.3), ((0.7, 0.65), 0.15))  # their centre, and their height


class ShallowWater:
    """The rectangle, cut into one block a rank: axis 0 is y, axis 1 is x."""

    def __init__(self, args: argparse.Namespace, cart: MPI.Cartcomm, node: mpishare.Node) -> None:
        self.args, self.cart, self.node, self.xp = args, cart, node, node.xp
        shape = tuple(n + 2 for n in args.shape)
        now, then = (
            tuple(node.allocate_each(shape, np.float64, fill=1).array for _ in range(3))
            for _ in range(2)
        )
        self.now, self.then = now, then
        self.halo = self.make_halo(args.staged)
        self.cells = boxes.Boxes(self.xp, now[0], [self.halo.owned])
        (self.kernel,) = boxes.kernels(self.xp, "shallow_water", "flow")

    def make_halo(self, form: str | None) -> Any:
        """Make the exchange: by mpishare, or staged. Collective."""
        cart, now, node, xp = self.cart, self.now, self.node, self.xp
        if form:
            return staged.make(form, cart, now, xp, corners=True)
        return mpishare.HaloExchange(cart, now, width=1, corners=True, node=node)

    def begin(self) -> None:
        """Set the owned cells to the initial values."""
        cells = np.multiply(self.args.shape, self.cart.dims).tolist()
        values = initial(cells, self.args.shape[0], self.cart)
        for field, value in zip(self.now, values, strict=True):
            field[self.halo.owned] = self.xp.asarray(value)
        self.node.synchronize()

    def step(self, count: int = 1) -> None:  # noqa: ARG002
        """Make a step."""
        self.halo.exchange(*self.now)
        self.flow()
        self.now, self.then = self.then, self.now

    def actions(self, halo: Any) -> dict[str, Callable[[], None]]:
        """Return what is timed of an exchange: by itself, and in a step."""

        def step() -> None:
            self.halo = halo
            self.step()

        return {"exchange": lambda: halo.exchange(*self.now), "step": step}

    def flow(self) -> None:
        """Set the owned cells of `then` from `now`."""
        if self.kernel:
            self.cells.launch(self.kernel, (*self.now, *self.then), np.float64(RATIO))
            return
        for box in self.cells:
            around = boxes.grown(box)
            h, x, y = (field[around] for field in self.now)
            for new, value in zip(self.then, flow((h, x, y)), strict=True):
                new[box] = value

    def mass(self) -> float:
        """Return how much water there is. Collective."""
        return float(self.cart.allreduce(float(self.now[0][self.halo.owned].sum())))


def flux_x(w: Water) -> Water:
    """Return what flows along x."""
    h, x, y = w
    return x, x * x / h + 0.5 * h * h, x * y / h


def flux_y(w: Water) -> Water:
    """Return what flows along y."""
    h, x, y = w
    return y, x * y / h, y * y / h + 0.5 * h * h


def divergence(w: Water) -> Water:
    """Return twice what leaves each square of four neighbors, from the fluxes in them."""
    f, g = flux_x(w), flux_y(w)
    return tuple(
        ((a[:-1, 1:] - a[:-1, :-1]) + (a[1:, 1:] - a[1:, :-1]))
        + ((b[1:, :-1] - b[:-1, :-1]) + (b[1:, 1:] - b[:-1, 1:]))
        for a, b in zip(f, g, strict=True)
    )


def flow(w: Water) -> Water:
    """Return the cells inside `w` after a step."""
    corners = tuple(
        0.25 * ((a[:-1, :-1] + a[:-1, 1:]) + (a[1:, :-1] + a[1:, 1:])) - 0.25 * RATIO * leaving
        for a, leaving in zip(w, divergence(w), strict=True)
    )
    return tuple(
        a[1:-1, 1:-1] - 0.5 * RATIO * leaving
        for a, leaving in zip(w, divergence(corners), strict=True)
    )


def initial(cells: Sequence[int], n: int, cart: MPI.Cartcomm | None = None) -> Water:
    """Return the water at rest of this rank's cells, or of all where there is no grid."""
    h: Any = 1.0
    for centre, height in DROPS:
        bells = [common.bump(each, c, n / 8) for each, c in zip(cells, centre, strict=True)]
        if cart is not None:
            bells = [common.my_part(cart, axis, bell) for axis, bell in enumerate(bells)]
        h = h + height * (bells[0][:, None] * bells[1][None, :])
    return h, np.zeros_like(h), np.zeros_like(h)


def reference(cells: Sequence[int], args: argparse.Namespace) -> Water:
    """Return the result from one process that has the whole rectangle."""
    w = initial(cells, args.shape[0])
    for _ in range(args.steps):
        h, x, y = (np.pad(field, 1, mode="wrap") for field in w)
        w = flow((h, x, y))
    return w


def check(
    found: Sequence[np.ndarray], drift: float, args: argparse.Namespace, backend: str
) -> list[str]:
    """Return what is wrong, as lines."""
    right = reference(found[0].shape, args)
    wrong = []
    for name, field, value in zip(("h", "hu", "hv"), found, right, strict=True):
        wrong += outcome.compare(backend, name, field, value)
    if not abs(drift) <= 1e-12:
        wrong.append(f"mass has changed by {drift:g} of itself")
    return wrong


def solve(args: argparse.Namespace, cart: MPI.Cartcomm, node: mpishare.Node) -> int:
    """Run, check and draw; return the exit status. Collective."""
    water = ShallowWater(args, cart, node)
    water.begin()
    # A kernel is loaded at its first use, and that must not wait for an exchange.
    water.flow()
    water.mass()
    for _ in range(3):
        water.step()
    water.begin()
    mass = water.mass()
    progress = common.progress(args, cart)
    step_us = timing.steps_us(node, cart, [1] * args.steps, water.step, progress)
    drift = water.mass() / mass - 1
    found: list[Any] = []
    if args.check or args.plot:
        found = [outcome.gather(cart, field[water.halo.owned]) for field in water.now]
    calls = min(args.steps, 100)
    times = timing.alone_us(node, cart, water.actions(water.halo), calls, progress)
    result = outcome.Outcome("shallow_water", args, node, cart, step_us, times["exchange"])
    result.facts["mass_drift"] = drift
    if args.compare:
        result.facts |= timing.compare_forms(
            node, cart, water.make_halo, water.actions, calls, progress
        )
    progress.close()
    if found and cart.rank == 0 and args.check:
        result.wrong = check(found, drift, args, node.backend)
    if found and cart.rank == 0 and args.plot:
        draw(found, args, cart)
    return result.tell()


def draw(found: Sequence[np.ndarray], args: argparse.Namespace, cart: MPI.Cartcomm) -> None:
    """Draw the depth and the speed, on rank 0."""
    h, x, y = found
    reach = float(np.abs(h - 1).max())
    speed = np.hypot(x, y) / h
    panels = [
        picture.Panel(h, "depth", "RdBu", (0, 1), (1 - reach, 1 + reach)),
        picture.Panel(speed, "speed", "magma", (0, 1), (0.0, float(speed.max()))),
    ]
    title = f"Shallow water: {args.steps} steps on {h.shape[0]} x {h.shape[1]} cells"
    picture.draw(args.plot, title, cart, panels)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the application; the exit status is 1 where the check fails."""
    args, cart = common.parse(common.parser(__doc__, n=256, steps=500), arguments, [True, True])
    with mpishare.Node() as node, common.stream(node):
        return solve(args, cart, node)


if __name__ == "__main__":
    common.run(main)

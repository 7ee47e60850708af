"""Turbulence from a Taylor-Green vortex: a pseudo-spectral solver on `Redistribute`.

Incompressible Navier-Stokes in a periodic box in float64, dealiased by the 2/3 rule, by the method
of Runge and Kutta. Each of its four stages goes from modes to space and back: Fourier transforms
are local along two axes, then `mpishare.Redistribute` makes the third one local. On any number of
ranks, which need not divide the box.

    mpirun -n 3 python scripts/applications/spectral.py --cells 32 --steps 40 --check
    mpirun -n 2 python scripts/applications/spectral.py --cells 64 --until 10 --plot decay.png
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

import common
import graphs
import numpy as np
import outcome
import timing
import transposes
from mpi4py import MPI
from navier_stokes import Flow, Links, modes, vortex

import mpishare
from mpishare.tools.cli import fail_usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    Array = Any  # numpy.ndarray or cupy.ndarray

#: Time, kinetic energy and its dissipation rate at Re = 1600 with 512^3 points: the log of the
#: pseudo-spectral example of NVIDIA's cuDecomp (examples/cc/taylor_green/data/tg_n512_output.txt),
#: which lies on the curve of W. M. van Rees, A. Leonard, D. I. Pullin and P. Koumoutsakos, Journal
#: of Computational Physics 230 (2011) 2794. Its enstrophy is multiplied by 2 / Re here.
PUBLISHED = (
    (0, 0.125000, 0.000469),
    (1, 0.124515, 0.000519),
    (2, 0.123917, 0.000708),
    (3, 0.123024, 0.001127),
    (4, 0.121508, 0.002066),
    (5, 0.118436, 0.004127),
    (6, 0.113581, 0.005531),
    (7, 0.107025, 0.007365),
    (8, 0.098290, 0.010373),
    (9, 0.086404, 0.012855),
    (10, 0.074480, 0.011269),
)
#: Time and rate of the largest dissipation in the data of the International Workshop on High-Order
#: CFD Methods, case C3.5 (cfd.ku.edu/hiocfd/spectral_Re1600_512.gdiag).
PEAK = (8.97, 0.0128575)

PUBLISHED_RE = 1600

CALLS = 10  # steps of what is compared, between two synchronizations
PER_UNIT = 16  # how often energy is noted, per unit of time


def reference(n: int, steps: int, nu: float) -> np.ndarray:
    """Return the velocity in space from one process that has the whole box, all modes of it."""
    k = np.stack(np.meshgrid(*[np.fft.fftfreq(n, 1 / n)] * 2, np.arange(n // 2 + 1), indexing="ij"))
    k2, is_kept = (k * k).sum(axis=0), (3 * abs(k) < n).all(axis=0)

    def to_modes(f: np.ndarray) -> np.ndarray:
        return np.fft.rfftn(f, axes=(1, 2, 3)) * is_kept

    def to_space(f: np.ndarray) -> np.ndarray:
        return np.fft.irfftn(f, (n, n, n), (1, 2, 3))

    def slope(u: np.ndarray) -> np.ndarray:
        force = to_modes(np.cross(to_space(u), to_space(1j * np.cross(k, u, axis=0)), axis=0))
        pressure = (k * force).sum(axis=0) / np.where(k2 == 0, 1, k2)
        return force - k * pressure - nu * k2 * u

    u, dt = to_modes(vortex(n)), 1 / n
    for _ in range(steps):
        first = slope(u)
        second = slope(u + dt / 2 * first)
        third = slope(u + dt / 2 * second)
        u = u + dt / 6 * (first + 2 * second + 2 * third + slope(u + dt * third))
    return to_space(u)


def check(flow: Flow, steps: int) -> list[str]:
    """Return what is wrong after these steps, as lines on rank 0. Collective."""
    numbers = {
        "dE/dt and the dissipation rate differ": flow.imbalance(),
        "the divergence of the velocity is": flow.divergence(),
    }
    found = flow.whole()
    if flow.cart.rank == 0:
        right = reference(flow.n, steps, flow.nu)
        error = float(abs(found - right).max() / abs(right).max())
        numbers["the velocity differs from that of one process"] = error
    allowed = 1e-12
    return [
        f"{what} by {value:.2g}, relatively; {allowed:g} is allowed"
        for what, value in numbers.items()
        if not value <= allowed  # NaN is wrong
    ]


def compare(flow: Flow, calls: int) -> tuple[dict[str, float], list[str]]:
    """Time a step with each form of the redistribution, in turns, and compare what it makes.

    Collective. Returns the times, and what is wrong, as lines on rank 0.
    """
    node, cart = flow.node, flow.cart
    made = {"mpishare": flow.make_links(None)}
    made |= {form: flow.make_links(form) for form in transposes.forms(node)}
    made["kernels"] = Links(*map(transposes.Still, made["mpishare"]))
    steps = {form: flow.stepper(links, graph=False) for form, links in made.items()}
    if not graphs.refusal(node, cart, made["mpishare"].six):
        for form in ("mpishare", "kernels"):
            steps[f"{form}_captured"] = flow.stepper(made[form], graph=True)
    found = {}
    for form, step in steps.items():
        for _ in range(3):  # of a captured one the second call makes the graph
            flow.begin()
            step()
        found[form] = flow.whole()
    wrong = []
    if cart.rank == 0:
        for form, velocity in found.items():
            if not form.startswith("kernels"):
                wrong += outcome.compare(node.backend, form, velocity, found["mpishare"])
    times = timing.alone_us(node, cart, steps, calls)
    for links in made.values():
        for each in links:
            each.close()
    facts = {f"{form}_step_us": times[form] for form in steps}
    for form in steps:
        if form != "mpishare":
            facts[f"{form}_step_to_mpishare"] = times[form] / times["mpishare"]
    return facts, wrong


def draw(path: str, args: argparse.Namespace, history: Array, spectrum: np.ndarray) -> None:
    """Draw energy and dissipation over time, and the spectrum at the end. Local: on rank 0."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (*decay, shells) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    found = np.array(history)
    right = np.array([row for row in PUBLISHED if row[0] <= found[-1, 0]])
    for column, axis in enumerate(decay, 1):
        axis.plot(found[:, 0], found[:, column], label=f"{args.cells}$^3$ points")
        if args.re == PUBLISHED_RE:
            axis.plot(right[:, 0], right[:, column], "o", label="published, 512$^3$")
        axis.set_title(("kinetic energy", "dissipation rate")[column - 1], fontsize=10)
        axis.set_xlabel("time")
        axis.legend()
    k = np.arange(2, modes(args.cells))  # by symmetry the vortex never has any of |k| = 1
    shells.loglog(k, spectrum[k], label="energy of a shell")
    shells.loglog(k, spectrum[2] * (k / 2) ** (-5 / 3), "--", color="gray", label="$k^{-5/3}$")
    shells.xaxis.set_minor_formatter("")
    shells.set_title(f"spectrum at time {found[-1, 0]:g}", fontsize=10)
    shells.set_xlabel("wavenumber")
    shells.legend()
    figure.suptitle(f"Taylor-Green vortex, Re = {args.re}", fontsize=11)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def beside_published(history: Sequence[tuple[float, float, float]]) -> list[str]:
    """Return a table of what was found at the times of the published values."""
    noted = {time: values for time, *values in history}
    lines = ["   t    energy  published  dissipation  published"]
    for time, energy, rate in PUBLISHED:
        if time in noted:
            e, r = noted[time]
            lines.append(f"{time:4d}  {e:.6f}   {energy:.6f}     {r:.6f}   {rate:.6f}")
    peak = max(history, key=lambda row: row[2])
    lines.append(
        "most at {:.2f}: {:.6f}; published: {:.2f}, {:.6f}".format(peak[0], peak[2], *PEAK)
    )
    return lines


def run(args: argparse.Namespace, cart: MPI.Cartcomm, node: mpishare.Node) -> int:
    """Make the steps, time, check and draw; return the exit status. Collective."""
    flow = Flow(args, cart, node)
    args.shape = (flow.rows.stop - flow.rows.start, args.cells, args.cells)
    problem = graphs.refusal(node, cart, flow.links.six) if args.graph else None
    if problem:
        return fail_usage("spectral", problem)
    step = flow.stepper(flow.links, graph=args.graph)
    for _ in range(3):
        step()
    flow.begin()
    history = [(0.0, *flow.decay())]
    done = 0

    def advance(_: int) -> None:
        nonlocal done
        step()
        done += 1
        if done * PER_UNIT % args.cells < PER_UNIT or done == args.steps:
            history.append((done / args.cells, *flow.decay()))

    step_us = timing.steps_us(node, cart, [1] * args.steps, advance)
    wrong = check(flow, args.steps) if args.check else []
    spectrum = flow.spectrum()
    calls = min(args.steps, CALLS)
    six, three = flow.links
    in_space = node.xp.zeros(three.source_shape, complex)
    in_modes = node.xp.zeros(six.target_shape, complex)
    exchange = {"both ways": lambda: (three.forward(in_space), six.backward(in_modes))}
    exchange_us = timing.alone_us(node, cart, exchange, calls)["both ways"]
    _, energy, rate = history[-1]
    time, _, peak = max(history, key=lambda row: row[2])
    facts = {"time": args.steps / args.cells, "energy": energy, "dissipation": rate}
    facts |= {"peak_dissipation": peak, "peak_time": time}
    if args.compare:
        times, differences = compare(flow, calls)
        facts |= times
        wrong += differences
    flow.close()
    if args.json:
        facts |= {"history": history, "spectrum": spectrum.tolist()}
    elif args.until and args.re == PUBLISHED_RE and cart.rank == 0:
        print(*beside_published(history), sep="\n", flush=True)
    if args.plot and cart.rank == 0:
        draw(args.plot, args, history, spectrum)
    return outcome.tell_steps("spectral", args, node, cart, wrong, facts, step_us, exchange_us)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the application; the exit status is 1 where the check fails."""
    parser = common.base_parser(__doc__)
    parser.add_argument(
        "--cells", type=common.count, metavar="N", default=64, help="points along each axis (64)"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=common.count, default=50, help="of 1 / N each (50)")
    length.add_argument("--until", type=common.count, metavar="TIME", help="instead of --steps")
    parser.add_argument(
        "--re", type=common.count, default=PUBLISHED_RE, help=f"Reynolds number ({PUBLISHED_RE})"
    )
    parser.add_argument(
        "--permute",
        action=argparse.BooleanOptionalAction,
        help="make x contiguous for its transform (on GPUs)",
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw the decay and the spectrum")
    parser.add_argument("--graph", action="store_true", help="launch a step as one CUDA graph")
    common.add_forms(parser, transposes.STAGED, "redistribute")
    args = parser.parse_args(arguments)
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error(f"--plot needs matplotlib: {sys.executable} -m pip install matplotlib")
    cart = MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.size], [True])
    kept = 2 * modes(args.cells) - 1
    if cart.size > kept:
        parser.error(f"--cells: {args.cells} keep {kept} modes along y, less than one per rank")
    if args.until:
        args.steps = args.until * args.cells
    with mpishare.Node() as node, common.stream(node):
        if args.permute is None:
            args.permute = node.backend == "cuda"
        return run(args, cart, node)


if __name__ == "__main__":
    common.run(main)

"""What the applications share: their arguments, their grid, and how they end.

Nothing here exchanges halos: that is in the programs, in three lines, and in `staged.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import graphs
import numpy as np
import orders
import outcome
import timing
from mpi4py import MPI
from orders import ORDERS
from timing import FORMS

from mpishare.tools import cli

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import mpishare


CALLS = 50  # of what is timed by itself, between two synchronizations


def count(text: str) -> int:
    """Read a number of cells or steps: an argument type."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return int(text)


class Parser(cli.Parser):
    """An argument parser of which rank 0 alone is heard, on all ranks of the same command line."""

    def error(self, message: str) -> NoReturn:
        """End every rank with status 2. Collective."""
        sys.exit(cli.fail_usage(self.prog, message))


def grid_parser(description: str | None, *, n: int) -> Parser:
    """Return a parser of the options that every application has: its ranks are equal blocks."""
    made = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--check", action="store_true", help="compare with a single process's NumPy")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    made.add_argument("--n", type=count, default=n, help=f"cells a rank along each axis ({n})")
    made.add_argument("--cells", type=count, metavar="N", help="cells of the whole, instead of --n")
    made.add_argument(
        "--dims", type=count, nargs="+", metavar="RANKS", help="ranks along each axis"
    )
    return made


def parser(description: str | None, *, n: int, steps: int) -> Parser:
    """Return a parser of the options of an application that makes steps."""
    made = grid_parser(description, n=n)
    made.add_argument("--steps", type=count, default=steps, help=f"time steps ({steps})")
    made.add_argument(
        "--staged",
        choices=FORMS[1:],
        help="exchange through the host by MPI messages instead of by mpishare",
    )
    made.add_argument("--compare", action="store_true", help="time all forms of that, in turns")
    return made


def add_orders(made: Parser, *, said: str, more: Sequence[str] = ()) -> None:
    """Add the options of an application whose steps come in several orders.

    Parameters
    ----------
    said : str
        Which one is taken where none is given.
    more : sequence of str
        Orders of this application alone.
    """
    orders = (*ORDERS, *more)
    made.add_argument("--order", choices=orders, help=f"of updates and exchange in a step ({said})")
    made.add_argument("--graph", action="store_true", help="launch many steps as one CUDA graph")
    made.add_argument(
        "--bench", action="store_true", help="time every order, and one rank alone, in turns"
    )


def parse(
    made: Parser, arguments: Sequence[str] | None, periods: Sequence[bool]
) -> tuple[argparse.Namespace, MPI.Cartcomm]:
    """Read the command line, and arrange all ranks as a grid with these periods.

    Collective. A wrong command line ends every rank with status 2. The namespace's `shape` is the
    cells of a rank.
    """
    args = made.parse_args(arguments)
    world, ndim = MPI.COMM_WORLD, len(periods)
    dims = args.dims or MPI.Compute_dims(world.size, ndim)
    if len(dims) != ndim or math.prod(dims) != world.size:
        made.error(f"--dims: {ndim} numbers whose product is {world.size}, the number of ranks")
    args.shape = (args.n,) * ndim
    if args.cells is not None:
        if any(args.cells % ranks for ranks in dims):
            made.error(f"--cells: {args.cells} is no multiple of the ranks along each axis, {dims}")
        args.shape = tuple(args.cells // ranks for ranks in dims)
    return args, world.Create_cart(dims, periods=periods)


def run(main: Callable[[], int]) -> NoReturn:
    """Exit with what `main` returns; an exception ends the job: others would wait for this rank."""
    sys.exit(cli.run_on_ranks(lambda _: main()))


def solve(steps: orders.Steps, check: Callable[[np.ndarray, Any], list[str]]) -> int:
    """Make the steps of an application, time and check; return the exit status. Collective.

    Parameters
    ----------
    steps : Steps
        With its name, its arguments, and what is timed.
    check : callable
        Takes the whole field, on rank 0, and `steps`; returns what is wrong, as lines.
    """
    args, cart, node = steps.args, steps.cart, steps.node
    problem = graphs.refusal(node, cart, steps.halo) if args.graph else None
    if problem:
        return cli.fail_usage(steps.name, problem)
    are_many = args.graph or getattr(args, "order", None) == "persistent"
    counts = orders.lengths(args.steps, steps.every, is_graph=are_many)
    steps.begin()
    steps.warm_up(counts)
    steps.begin()
    step_us = timing.steps_us(node, cart, counts, steps.run)
    wrong: list[str] = []
    if args.check:
        whole = outcome.gather(cart, steps.u[steps.mine])
        if whole is not None:
            wrong = check(whole, steps)
    calls = min(args.steps, CALLS)
    actions = steps.actions(steps.halo) | steps.parts_of_a_step()
    times = timing.alone_us(node, cart, actions, calls)
    steps.order = args.order
    facts = steps.facts(times)
    if args.bench:
        count = min(steps.every, graphs.LONGEST)
        facts |= orders.compare(node, cart, steps, count, -(-args.steps // count))
    if args.compare:
        facts |= timing.compare_forms(node, cart, steps.make_halo, steps.actions, calls)
    steps.close()
    return outcome.tell_steps(
        steps.name, args, node, cart, wrong, facts, step_us, times["exchange"]
    )


def order_for(node: mpishare.Node, order: str) -> str:
    """Return this order, or ``plain`` where nothing overlaps.

    On the host nothing travels between `start` and `wait`. Ranks that share a GPU fill it with
    their interiors; what is to overlap only waits longer, without the Multi-Process Service for
    whole turns of others.
    """
    if node.backend == "host":
        return "plain"
    gpus = [each.device.uuid for each in node.report().members if each.device is not None]
    return order if len(set(gpus)) == node.size else "plain"


def stream(node: mpishare.Node) -> contextlib.AbstractContextManager[Any]:
    """Return a stream that all work of a `with` block goes to, where there are streams."""
    if node.backend == "cuda":
        made: contextlib.AbstractContextManager[Any] = node.xp.cuda.Stream(non_blocking=True)
        return made
    return contextlib.nullcontext()


def my_part(cart: MPI.Cartcomm, axis: int, profile: np.ndarray) -> np.ndarray:
    """Return this rank's part of what is given along a whole axis.

    Everybody computes the whole: a sine's last bit may depend on where in an array it stands.
    """
    n = len(profile) // cart.dims[axis]
    return profile[cart.coords[axis] * n :][:n]


def bump(cells: int, centre: float, width: float) -> np.ndarray:
    """Return a periodic bell curve along an axis.

    Parameters
    ----------
    cells : int
        Along the whole axis.
    centre : float
        As a part of the axis.
    width : float, cells
        Its standard deviation.
    """
    angle = 2 * np.pi * ((np.arange(cells) + 0.5) / cells - centre)
    return np.exp((np.cos(angle) - 1) * (cells / (2 * np.pi * width)) ** 2)

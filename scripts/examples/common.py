"""What the examples share: their arguments, their grid, and how they end.

Nothing here exchanges halos: that is in the programs, in three lines, and in `staged.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from mpi4py import MPI
from timing import FORMS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import mpishare


def count(text: str) -> int:
    """Read a number of cells or steps: an argument type."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return int(text)


class Parser(argparse.ArgumentParser):
    """An argument parser of which rank 0 alone is heard, on all ranks of the same command line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong; nobody leaves before that, which would end the job."""
        if MPI.COMM_WORLD.rank == 0:
            self.print_usage(sys.stderr)
            sys.stderr.write(f"{self.prog}: error: {message}\n")
            sys.stderr.flush()
        MPI.COMM_WORLD.Barrier()
        sys.exit(2)

    def _print_message(self, message: str, file: Any = None) -> None:
        if MPI.COMM_WORLD.rank == 0:
            super()._print_message(message, file)


def parser(description: str | None, *, n: int, steps: int) -> Parser:
    """Return a parser of the options that every example has."""
    made = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--n", type=count, default=n, help=f"cells a rank along each axis ({n})")
    made.add_argument("--steps", type=count, default=steps, help=f"time steps ({steps})")
    made.add_argument(
        "--staged",
        choices=FORMS[1:],
        help="exchange through the host by MPI messages instead of by mpishare",
    )
    made.add_argument(
        "--compare", action="store_true", help="time all three exchanges, in turns, in this job"
    )
    made.add_argument("--check", action="store_true", help="compare with a single process's NumPy")
    made.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the result")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def parse(made: Parser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; a wrong one ends every rank with status 2. Collective."""
    args = made.parse_args(arguments)
    problem = None
    if args.plot is not None:  # rank 0 draws
        if importlib.util.find_spec("matplotlib") is None:
            problem = "--plot needs matplotlib: pip install matplotlib"
        elif not args.plot.parent.is_dir():
            problem = f"--plot: there is no folder {args.plot.parent}"
    problem = MPI.COMM_WORLD.bcast(problem)
    if problem:
        made.error(problem)
    return args


def run(main: Callable[[], int]) -> NoReturn:
    """Exit with what `main` returns; an exception ends the job: others would wait for this rank."""
    try:
        status = main()
    except Exception:
        world = MPI.COMM_WORLD
        sys.stderr.write(f"rank {world.rank} of {world.size}:\n{traceback.format_exc()}")
        sys.stderr.flush()
        world.Abort(1)
        raise
    sys.exit(status)


def make_grid(periods: Sequence[bool]) -> MPI.Cartcomm:
    """Arrange all ranks as a grid. Collective."""
    world = MPI.COMM_WORLD
    return world.Create_cart(MPI.Compute_dims(world.size, len(periods)), periods=periods)


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

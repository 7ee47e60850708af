"""Time Veros' exchange of ghost cells, before and after the patch, in turns in one process.

    mpirun -n 2 python -m mpi4py veros_time.py BEFORE AFTER --grid 2 1

BEFORE and AFTER are two versions of Veros' ``distributed.py``. First both exchange fields of
several shapes and dtypes, cyclic and not, and must give the same bits. Then they are timed in
blocks of calls that take turns; a time is the block's, divided by its calls, on the slowest rank.
As in the model each call takes one of a dozen fields and replaces it with the new array that it
returns.
"""

import argparse
import importlib.util
from itertools import cycle

import numpy as np
from turns import COMM, times
from veros import runtime_settings

SIZES = (30, 42, 15), (240, 42, 15)  # cells of the whole grid; the first is Veros' setup `acc`
FIELDS = 12


def load(path):
    """Return what exchanges ghosts in a version of the module."""
    spec = importlib.util.spec_from_file_location("distributed", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.exchange_overlap


def local_shape(size, grid):
    """Return the shape of this rank's part, ghosts counted."""
    return (size[0] // grid[0] + 4, size[1] // grid[1] + 4, *size[2:])


def compare(forms, size, grid):
    """Abort unless all forms give the same bits, and leave the array that they are given alone."""
    random = np.random.default_rng(COMM.rank)
    shape = local_shape(size, grid)
    for dims in (
        ("xt", "yt"),
        ("xu", "yu", "zt"),
        ("xt", "yt", "zt", "timesteps"),
        ("xt",),
        ("yt",),
    ):
        of_dims = {"x": shape[0], "y": shape[1], "z": shape[2], "t": 3}
        for dtype in ("f8", "f4", "i8", "?"):
            field = (100 * random.random([of_dims[dim[0]] for dim in dims])).astype(dtype)
            for cyclic in (True, False):
                given = field.copy()
                first, *others = (form(given, dims, cyclic).tobytes() for form in forms.values())
                assert given.tobytes() == field.tobytes()
                assert all(other == first for other in others), (dims, dtype, cyclic)


def in_turn(form, size, grid):
    """Return the call that exchanges the next field of a form's own."""
    random, shape = np.random.default_rng(COMM.rank), local_shape(size, grid)
    fields, turns = [random.random(shape) for _ in range(FIELDS)], cycle(range(FIELDS))

    def call():
        at = next(turns)
        fields[at] = form(fields[at], ("xt", "yt", "zt"), True)

    return call


def main():
    """Compare, then time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--grid", type=int, nargs=2, default=(2, 1), help="ranks along x and y")
    parser.add_argument("--rounds", type=int, default=300, help="0: compare the bits alone")
    options = parser.parse_args()
    grid = tuple(options.grid)
    runtime_settings.num_proc = grid
    forms = {"before": load(options.before), "after": load(options.after)}
    for size in SIZES:
        compare(forms, size, grid)
    if COMM.rank == 0:
        print(f"{COMM.size} ranks, {grid[0]} x {grid[1]}: the same bits", flush=True)
    for size in SIZES if options.rounds else ():
        calls = {name: in_turn(form, size, grid) for name, form in forms.items()}
        found = times(calls, options.rounds)
        if COMM.rank == 0:
            cells = " x ".join(map(str, size))
            ratios = np.divide(found["after"], found["before"])
            for name, each in found.items():
                low, median, high = np.percentile(each, (25, 50, 75))
                print(f"{cells} {name:7} {median:7.1f} us ({low:.1f} to {high:.1f})")
            low, median, high = np.percentile(ratios, (25, 50, 75))
            print(f"{cells} ratio   {median:7.2f}    ({low:.2f} to {high:.2f})", flush=True)


if __name__ == "__main__":
    main()

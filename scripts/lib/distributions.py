"""Random redistributions, compared with NumPy, as many as are asked for.

mpirun -n RANKS python scripts/lib/distributions.py [--cases N] [--first SEED]

Each is a plan of its own: arrays of 1 to 4 axes, of 1 to 16 bytes per element, cut in any way that
the plan takes, permuted or not, there and back, in arrays with gaps and without. MPISHARE_ROUTE
forces a route, MPISHARE_HOST_CODE=python the engine in NumPy; with MPICH, `mpirun -launcher fork
-hosts a:2,b:1` pretends to be on two nodes.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from mpi4py import MPI

import mpishare

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.helpers.distributions import check_case


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=1000, help="the seed of the first case")
    given, world, routes = parser.parse_args(), MPI.COMM_WORLD, Counter()
    with mpishare.Node(world) as node:
        for seed in range(given.first, given.first + given.cases):
            try:
                plan = check_case(node, world, seed)
            except BaseException as error:
                error.add_note(f"seed {seed} on {world.size} ranks")
                raise
            routes.update(set(plan.routes.values()))
            plan.close()
    if world.rank == 0:
        print(f"{given.cases} random distributions on {world.size} ranks: as NumPy has them")
        print("plans by route:", ", ".join(f"{name} {count}" for name, count in routes.items()))


if __name__ == "__main__":
    main()

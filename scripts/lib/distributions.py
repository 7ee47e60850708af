"""Random redistributions, compared with NumPy, as many as are asked for.

mpirun -n RANKS python scripts/lib/distributions.py [--cases N] [--first SEED] [--large] [--pause S]

Each is a plan of its own: arrays of 1 to 4 axes, of 1 to 16 bytes per element, cut in any way that
the plan takes, permuted or not, there and back, in arrays new and old, with gaps and without; one
plan is called while another one is open. Plans are on all ranks, on these in reverse order, or on
each half of them. Ranks have 1 to 8 MiB with `--large`, and are late now and then with `--pause`.
MPISHARE_ROUTE forces a route, MPISHARE_HOST_CODE=python the engine in NumPy; with MPICH, `mpirun
-launcher fork -hosts a:2,b:1` pretends to be on two nodes.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from mpi4py import MPI

import mpishare

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.helpers.distributions import Checked


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=1000, help="the seed of the first case")
    parser.add_argument("--large", action="store_true", help="parts that are read in place")
    parser.add_argument("--pause", type=float, default=0, help="the longest pause, in seconds")
    given, world, routes = parser.parse_args(), MPI.COMM_WORLD, Counter()
    comms = [world, world.Split(0, -world.rank)]
    if world.size % 2 == 0:  # halves of equal size, so that both have the same case
        comms.append(world.Split(world.rank % 2, world.rank))
    with mpishare.Node(world) as node:
        last = None
        for seed in range(given.first, given.first + given.cases):
            try:
                comm = comms[seed % len(comms)]
                checked = Checked(node, comm, seed, is_large=given.large, pause_s=given.pause)
                for _ in range(4):
                    checked.step(last and last.step)
                checked.require_no_way_back()
            except BaseException as error:
                error.add_note(f"seed {seed} on {world.size} ranks")
                raise
            routes.update(set(checked.plan.routes.values()))
            if last:
                last.close()
            last = checked
        if last:
            last.close()
    if world.rank == 0:
        print(f"{given.cases} random distributions on {world.size} ranks: as NumPy has them")
        print("plans by route:", ", ".join(f"{name} {count}" for name, count in routes.items()))


if __name__ == "__main__":
    main()

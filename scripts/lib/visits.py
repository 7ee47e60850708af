"""Count through how many files of mpishare the making of a HaloExchange goes.

mpirun -n 2 python3 scripts/lib/visits.py [-v]

Uses the public names of the mpishare that PYTHONPATH finds, so that revisions can be compared.
Each of several times the ranks make a node on the host backend, and on it a HaloExchange of a
periodic grid with one axis. While that is made, `sys.setprofile` sees every call of a Python
function and every return.

files   with code of mpishare that ran, the first time
moves   calls and returns after which another file of mpishare runs than before. A rank that waits
        for another moves to and fro while it spins, so it is the fewest of all ranks and times,
        and still differs by a few per cent from run to run; on one rank it is exact.
calls   places in the code from which another file of mpishare is called, each once: spins do not
        change them
"""

import collections
import sys
from pathlib import Path

from mpi4py import MPI

import mpishare

HOME = str(Path(mpishare.__file__).parent)
TIMES = 20


class Visits:
    """A profile function: the files of mpishare in the order in which they ran."""

    def __init__(self) -> None:
        self.trail: list[str] = []
        self.stack: list[str] = []
        self.calls: set[tuple[str, int, str, str]] = set()

    def __call__(self, frame, event: str, _) -> None:
        if event == "call":
            file = frame.f_code.co_filename
            # Code of other libraries is taken for a part of what called it.
            above = self.stack[-1] if self.stack else ""
            if not file.startswith(HOME):
                file = above
            elif above not in ("", file):
                self.calls.add((above, frame.f_back.f_lineno, file, frame.f_code.co_name))
            self.stack.append(file)
        elif event == "return" and self.stack:
            self.stack.pop()
        else:
            return
        if self.stack and self.stack[-1]:
            self.trail.append(self.stack[-1])

    @property
    def moves(self) -> int:
        return sum(a != b for a, b in zip(self.trail, self.trail[1:], strict=False))


def visit() -> Visits:
    visits = Visits()
    with mpishare.Node(backend="host") as node:
        cart = node.comm.Create_cart([node.size], periods=[True])
        field = node.xp.zeros((10, 6, 4))
        node.barrier()
        sys.setprofile(visits)
        try:
            plan = mpishare.HaloExchange(cart, field, 1, axes=(0,), node=node)
        finally:
            sys.setprofile(None)
        plan.close()
        cart.Free()
    return visits


def main(words: list[str]) -> None:
    world = MPI.COMM_WORLD
    found = [visit() for _ in range(TIMES)]
    first = world.bcast(found[0].trail)
    moves = world.allreduce(min(visits.moves for visits in found), MPI.MIN)
    every = world.allgather(set().union(*(visits.calls for visits in found)))
    calls = len(set().union(*every))
    if world.rank == 0:
        print(
            f"HaloExchange() on {world.size} ranks: {len(set(first))} files, {moves} moves, "
            f"{calls} calls"
        )
        best = min(found, key=lambda visits: visits.moves)
        entered = [b for a, b in zip(["", *best.trail], best.trail, strict=False) if a != b]
        if "-v" in words:
            for file, count in collections.Counter(entered).most_common():
                print(f"{count:5d} {Path(file).relative_to(HOME)}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""An antiperiodic lattice: fermions change sign where time begins again.

    mpirun -n 2 python -m mpi4py scripts/examples/44_antiperiodic.py

Time is cut over the ranks. The exchange multiplies what crosses the end by -1, so that the hop over
it needs no case of its own; its adjoint, by which derivatives flow back, does so too.
"""

import numpy as np
from mpi4py import MPI

import mpishare

comm = MPI.COMM_WORLD
rng = np.random.default_rng(comm.rank)
shape = 4 + 2, 3, 3, 2  # time with a ghost at both ends, two of space, spin
before, behind = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
first, last = comm.rank == 0, comm.rank == comm.size - 1
seams = [
    mpishare.Seam((0, np.s_[:1]), (before, 0, np.s_[-2:-1]), scale=-1 if first else 1),
    mpishare.Seam((0, np.s_[-1:]), (behind, 0, np.s_[1:2]), scale=-1 if last else 1),
]


def lattice(xp):
    """Whole numbers, so that sums of them are exact."""
    return xp.asarray((rng.integers(-9, 9, shape) + 1j * rng.integers(-9, 9, shape)).astype("c16"))


with mpishare.Node() as node:
    xp = node.xp
    u, v = lattice(xp), lattice(xp)
    with mpishare.SeamExchange(comm, u, seams, node=node) as plan:
        u[0] = u[-1] = 0
        mine = u.copy()
        plan.exchange(u)
        # What leaves at one end of time comes back at the other with the other sign.
        total = comm.allreduce(complex(u[0].sum() + u[-1].sum()))
        own = complex(mine[1].sum()) * (-1) ** first + complex(mine[-2].sum()) * (-1) ** last
        right = total == comm.allreduce(own)
        # <v, exchange of u> = <adjoint of v, u>
        there = comm.allreduce(complex(xp.vdot(v, u)))
        plan.accumulate(v)
        back = comm.allreduce(complex(xp.vdot(v, mine)))
        right &= there == back
    if not comm.allreduce(right, MPI.LAND):
        raise SystemExit(f"rank {comm.rank}: WRONG")
if comm.rank == 0:
    print(f"{comm.size} ranks, antiperiodic in time, and its adjoint: right")

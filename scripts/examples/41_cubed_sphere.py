"""Vectors on a cubed sphere: across an edge of the cube the axes of the next face are turned.

    mpirun -n 3 python -m mpi4py scripts/examples/41_cubed_sphere.py

Each rank has some of the six faces, and of each the components of a vector along both axes. Where
faces meet turned, a ghost of the one component comes from the other, perhaps with another sign.
"""

import numpy as np
from mpi4py import MPI

import mpishare

N = 8  # cells along an edge; those of a face are centered at odd numbers from 1 - N on
comm = MPI.COMM_WORLD
x, y, z = np.eye(3, dtype=int)
# The normal of each face, then its two axes, as NDSL has them.
FACES = [(x, y, z), (y, -x, z), (z, -x, -y), (-x, -z, -y), (-y, -z, x), (-z, y, x)]
ALONG = np.arange(1 - N, N, 2)  # positions of the cells along an edge
OWNED = np.s_[1:-1, 1:-1]

owners = np.arange(6).reshape(6, 1, 1) % comm.size  # of one block a face
mine = FACES[comm.rank :: comm.size]
seams = mpishare.seams.cubed_sphere(owners, 1, comm.rank, components=2, vectors=[(0, 1)])

with mpishare.Node() as node:
    xp = node.xp
    fields = [xp.zeros((N + 2, N + 2)) for _ in range(2 * len(mine))]
    with mpishare.SeamExchange(comm, fields, seams, node=node, backend=node.backend) as plan:
        for around in (x, y, z):
            for number, (normal, *axes) in enumerate(mine):
                # On the four faces beside the axis: along it the same across the edges between.
                vector = np.cross(around, normal)
                one, other = (ALONG * (axis @ around) for axis in axes)
                height = one[:, None] + other
                for component, axis in enumerate(axes):
                    field = fields[2 * number + component]
                    field[...] = np.nan
                    field[OWNED] = xp.asarray((axis @ vector) * height)
            plan.exchange(*fields)
            for number, (normal, *axes) in enumerate(mine):
                for field in fields[2 * number : 2 * number + 2] if not normal @ around else ():
                    # Beyond the edges that lie along the axis are copies of the cells before them.
                    rows = field[:, 1:-1] if not axes[0] @ around else field[1:-1].T
                    if not bool((rows[0] == rows[1]).all() and (rows[-1] == rows[-2]).all()):
                        raise SystemExit(f"rank {comm.rank}: WRONG around {around}")
comm.Barrier()
if comm.rank == 0:
    print(f"6 faces of {N * N} cells on {comm.size} ranks, vectors turned across 12 edges: right")

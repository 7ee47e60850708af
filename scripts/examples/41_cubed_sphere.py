"""Vectors on a cubed sphere: across an edge of the cube the axes of the next face are turned.

    mpirun -n 3 python -m mpi4py scripts/examples/41_cubed_sphere.py

Each rank has some of the six faces. The exchange brings the components along the neighbor's axes;
a product with a matrix of 0, 1 and -1 for each ghost makes them those along one's own.
"""

import numpy as np
from mpi4py import MPI

import mpishare

N = 8  # cells along an edge; those of a face are centered at odd numbers from 1 - N on
comm = MPI.COMM_WORLD
x, y, z = np.eye(3, dtype=int)
# The normal of each face, then its two axes: turned, flipped and swapped from face to face. All
# points are 3 integers from -N to N.
FACES = [(x, y, z), (y, -x, z), (-x, z, y), (-y, z, -x), (z, -y, x), (-z, x, -y)]
AXES = {tuple(normal): np.stack(axes) for normal, *axes in FACES}
ALONG = np.arange(1 - N, N, 2)[:, None]  # positions of the cells along an edge

owned, ghosts, normals, turns = [], [], [], []  # points, points, and for each place of my array
mine = FACES[comm.rank :: comm.size]
for normal, one, other in mine:
    owned += [N * normal + s * one + ALONG * other for s in ALONG]
    normals += [normal] * N * N
for normal, one, other in mine:
    for across, along in ((-one, other), (one, other), (-other, one), (other, one)):
        # The cells beyond this edge are the first on the face whose normal points across it. What
        # points across on my face, goes down on that one.
        ghosts.append(N * across + (N - 1) * normal + ALONG * along)
        normals += [normal] * N
        mapped = np.outer(across, -normal) + np.outer(along, along)
        turns += [np.stack([one, other]) @ mapped @ AXES[tuple(across)].T] * N
points, n_owned = np.concatenate(owned + ghosts), N * N * len(mine)

with mpishare.Node() as node:
    xp, turns = node.xp, node.xp.asarray(np.array(turns), dtype=float)
    field = xp.zeros((len(points), 2))  # the components of a vector for each place
    ids = (points + N) @ [(2 * N + 1) ** 2, 2 * N + 1, 1]  # a number for each point
    with mpishare.NeighborExchange.from_global_ids(comm, ids, n_owned, field, node=node) as ex:
        for axis in (x, y, z):
            # Around an axis, on the four faces beside it: the same across the edges between them.
            around, height = np.cross(axis, normals), points @ axis
            axes = np.stack([AXES[tuple(normal)] for normal in normals])
            right = np.einsum("pij,pj->pi", axes, around) * height[:, None]
            field[:n_owned], field[n_owned:] = xp.asarray(right[:n_owned]), -1
            ex.exchange(field)
            field[n_owned:] = xp.einsum("pij,pj->pi", turns, field[n_owned:])
            is_beside = xp.asarray((normals @ axis == 0) & (abs(height) < N))
            if not bool((field == xp.asarray(right))[is_beside].all()):
                raise SystemExit(f"rank {comm.rank}: WRONG around {axis}")
comm.Barrier()
if comm.rank == 0:
    print(f"{6 * N * N} cells on {comm.size} ranks, vectors turned across 12 edges: right")

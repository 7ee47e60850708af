"""A transpose in which nothing moves: projections and sinograms are views of one window.

    mpirun -n 4 python -m mpi4py scripts/examples/25_views.py

Tomography corrects images one by one, and reconstructs slices one by one. On one node the stack is
there once, for all ranks: each rank writes its images, and after a fence reads its slices.
"""

import numpy as np
from mpi4py import MPI

import mpishare

ANGLES, ROWS, COLUMNS = 12, 8, 16

with mpishare.Node() as node:
    shape = ANGLES, ROWS, COLUMNS
    window = node.allocate(shape, np.float32)
    with mpishare.Redistribute(MPI.COMM_WORLD, shape, 0, 1, np.float32, node=node) as plan:
        images = window.array[plan.source_box.slices]  # this rank's angles
        slices = window.array[plan.target_box.slices]  # this rank's rows, at all angles

    window.fence()
    for angle, image in enumerate(images, start=plan.source_box.lower[0]):
        image[...] = angle + 100 * node.xp.arange(ROWS)[:, None]
    window.fence()  # images are written before any rank reads slices

    angles = node.xp.arange(ANGLES)[:, None, None]
    rows = node.xp.arange(plan.target_box.lower[1], plan.target_box.upper[1])[:, None]
    right = bool((slices == angles + 100 * rows).all())
    window.fence()
    if not node.comm.allreduce(right, MPI.LAND):
        raise SystemExit("WRONG: a slice lacks an image")
    if node.is_leader:
        print(f"{node.comm.size} ranks, one stack of {window.array.nbytes} bytes: right")

"""A Fourier transform of an array in blocks of rows: whole rows, then whole columns.

    mpirun -n 4 python -m mpi4py scripts/examples/23_fft2.py

Along the axis that no rank cuts each rank transforms alone. Between the two a `Redistribute` turns
blocks of rows into blocks of columns, stored so that each column is contiguous.
"""

import numpy as np
from mpi4py import MPI

import mpishare

N = 60

with mpishare.Node() as node:
    xp = node.xp
    plan = mpishare.Redistribute(
        MPI.COMM_WORLD, (N, N), source=0, target=1, dtype=complex, permute=(1, 0), node=node
    )
    i, j = np.indices((N, N))
    whole = np.cos(2 * np.pi * (3 * i + 5 * j) / N) + 1j * (i == j)
    rows = xp.asarray(whole[plan.source_box.slices])  # a program would have made these alone

    columns = plan.forward(xp.fft.fft(rows, axis=1))
    columns = xp.fft.fft(columns, axis=1)  # axis 1 is that of the rows now
    there = xp.allclose(columns, xp.asarray(np.fft.fft2(whole)[plan.target_box.slices].T))

    rows_again = plan.backward(xp.fft.ifft(columns, axis=1))
    back = xp.allclose(xp.fft.ifft(rows_again, axis=1), rows)

    plan.close()
    if not node.comm.allreduce(bool(there and back), MPI.LAND):
        raise SystemExit("WRONG: the transform differs from that of one process")
    if node.is_leader:
        print(f"{node.comm.size} ranks, {N} x {N}: right")

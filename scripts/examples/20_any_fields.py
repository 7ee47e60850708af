"""One plan for all fields of a block, whatever their dtypes and their other axes.

    mpirun -n 4 python -m mpi4py scripts/examples/20_any_fields.py

A height, tracers and a mask go around a ring, a cell per step, until they are back. `Layout(shape,
None)` stands for any fields of the block: what a call gives for the first time, all ranks agree on.
"""

from mpi4py import MPI

import mpishare

NX, NY, TRACERS = 8, 6, 3

with mpishare.Node() as node:
    xp, comm = node.xp, MPI.COMM_WORLD
    block = mpishare.Layout.any((NX + 2, NY))
    halo = mpishare.HaloExchange(
        comm, block, width=(1, 0), dims=(comm.size, 1), periods=True, node=node
    )

    height = xp.zeros((NX + 2, NY))
    tracers = xp.zeros((NX + 2, NY, TRACERS), "f4")
    mask = xp.zeros((NX + 2, NY), "i4")
    fields = height, tracers, mask
    for number, field in enumerate(fields, 1):
        cells = xp.arange(field[halo.owned].size).reshape(field[halo.owned].shape)
        field[halo.owned] = (number * cells + 10 * comm.rank) % 1000
    first = [field[halo.owned].copy() for field in fields]

    behind = halo.shifted(halo.owned, 0, -1)
    moves = 0
    for step in range(NX * comm.size):
        if step % 2:
            halo.exchange(*fields)  # all at once
        else:
            for field in fields:  # or each alone
                halo.exchange(field)
        for field in fields:
            field[halo.owned] = field[behind].copy()
        if step == 0:
            moves = sum(int((f[halo.owned] != g).sum()) for f, g in zip(fields, first, strict=True))

    wrong = [
        str(field.dtype)
        for field, before in zip(fields, first, strict=True)
        if not bool((field[halo.owned] == before).all())
    ]
    if comm.allreduce(len(wrong)) or not moves:
        raise SystemExit(f"rank {comm.rank}: WRONG: {wrong}, {moves} cells had moved")
    if comm.rank == 0:
        print(f"{halo}: right")

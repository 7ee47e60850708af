"""A forgotten fence, found: with MPISHARE_CHECK=1 the next collective call names both lines.

    mpirun -n 4 python -m mpi4py scripts/examples/38_forgotten_fence.py

For debugging, on the host: on GPUs accesses are not seen.
"""

import os

import mpishare

os.environ["MPISHARE_CHECK"] = "1"  # before the node is made; by hand it is set for the whole job

with mpishare.Node(backend="host") as node:
    window = node.allocate(1000, fill=0.0)
    others_see = node.size > 1
    found = ""
    try:
        if node.is_leader:
            window.array[...] = 1.0
        # window.fence() is missing here
        if not node.is_leader:
            total = window.array.sum()  # of some old values, perhaps
        window.fence()
    except mpishare.EpochError as error:
        found = str(error)

    if node.is_leader:
        window.array[...] = 2.0
    window.fence()
    total = window.array.sum()
    node.barrier()  # no error: now there is an order

    if bool(found) != others_see or total != 2000.0:
        raise SystemExit(f"rank {node.rank}: WRONG: {found!r}, {total}")
    if node.is_leader:
        print(found or "one rank alone has no race")
        print("a forgotten fence was found: right")

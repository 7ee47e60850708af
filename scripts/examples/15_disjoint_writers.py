"""One buffer of a pool, and every rank writes its own part of it from its own GPU.

    mpirun -n 4 python -m mpi4py scripts/examples/15_disjoint_writers.py

The parts are disjoint: nobody waits for anybody until all is written.
"""

import mpishare

PART = 1 << 20  # elements per rank

with mpishare.Node() as node:
    xp, comm = node.xp, node.comm
    pool = node.pool()
    if node.is_leader:
        buffer = pool.allocate(PART * node.size, "i4")
        comm.bcast(pool.handle(buffer), node.leader)
    else:  # on this rank's GPU, over the link where it is another one
        buffer = pool.open(comm.bcast(None, node.leader))

    mine = buffer[PART * node.rank : PART * (node.rank + 1)]
    mine[...] = PART * node.rank + xp.arange(PART)
    node.synchronize()  # my part is written
    node.barrier()  # so are all others

    wrong = int((buffer != xp.arange(PART * node.size)).sum())
    if wrong:
        raise SystemExit(f"rank {node.rank}: WRONG: {wrong} elements")
    node.barrier()  # all have read, before the owner may drop it
    if node.is_leader:
        print(f"{node.size} ranks wrote {buffer.nbytes >> 20} MiB: right")

"""A pool as CuPy's allocator: each array that CuPy makes can be opened by other ranks.

    mpirun -n 2 python -m mpi4py scripts/examples/35_allocator.py

Without a GPU it says why NumPy has no such allocator, and the array comes from the pool itself.
"""

import mpishare

with mpishare.Node() as node:
    xp, comm = node.xp, node.comm
    pool = node.pool()
    if node.is_leader:
        if node.backend == "cuda":
            with xp.cuda.using_allocator(pool.malloc):
                x = xp.arange(1000.0)
                total = (x * x)[::2]  # a temporary of CuPy's, and a view of it
        else:
            try:
                pool.malloc(8)
            except mpishare.UnsupportedError as error:
                print(error)
            x = xp.arange(1000.0)
            total = xp.multiply(x, x, out=pool.allocate(1000))[::2]
        node.synchronize()  # written, before anybody hears of it
        comm.bcast(pool.handle(total))
    else:
        total = pool.open(comm.bcast(None))  # the same bytes, no copy
    if float(total.sum()) != float(sum(n * n for n in range(0, 1000, 2))):
        raise SystemExit(f"rank {node.rank}: WRONG: {total}")
    # The others let go before the owner does.
    comm.barrier()
    total = None
    node.barrier()
    if node.is_leader:
        print(f"a temporary of rank 0 was seen on {node.size} ranks: right")

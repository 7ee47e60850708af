"""What a pool costs, and what windows and plans would cost if they stood on pools.

mpirun -n 2 python scripts/lib/pool_costs.py [COUNT]

Prints microseconds, of the slowest rank. On GPUs also the driver's own calls, and `node.allocate`
and `HaloExchange` twice: with the legacy handles that mpishare uses, and with its device memory
taken from one pool per rank instead.
"""

import gc
import os
import random
import statistics
import sys
import time
from functools import partial

from mpi4py import MPI

import mpishare

MIB = 1 << 20


def slowest(comm, seconds):
    """Microseconds of the slowest rank."""
    return 1e6 * comm.allreduce(seconds, MPI.MAX)


def say(node, name, *figures):
    if node.is_leader:
        shown = "  ".join(f"{figure:10.1f}" for figure in figures)
        print(f"{name:58s} {shown}", flush=True)


def timed(node, work):
    """What `work` returned, and the microseconds that it took the slowest rank."""
    node.barrier()
    begin = time.perf_counter()
    result = work()
    node.synchronize()
    return result, slowest(node.comm, time.perf_counter() - begin)


def time_pool(node, count):
    """Microseconds per call of a pool."""
    _, made = timed(node, lambda: node.pool().close())
    pool, again = timed(node, node.pool)
    say(node, "node.pool and close; node.pool once more", made, again)
    sizes = [random.Random(1).randrange(1, 1000) for _ in range(count)]
    for name in ("first", "again"):
        arrays, handles, took = [], None, {}
        begin = time.perf_counter()
        if node.is_leader:
            arrays = [pool.allocate(size) for size in sizes]
            took["allocate"] = time.perf_counter() - begin
            begin = time.perf_counter()
            handles = [pool.handle(array) for array in arrays]
            took["handle"] = time.perf_counter() - begin
            node.synchronize()
        handles = node.comm.bcast(handles)
        random.Random(2).shuffle(handles)
        if not node.is_leader:
            begin = time.perf_counter()
            arrays = [pool.open(handle) for handle in handles]
            took["open"] = time.perf_counter() - begin
        node.synchronize()
        node.barrier()
        begin = time.perf_counter()
        arrays.clear()
        gc.collect()
        if not node.is_leader:
            pool._blocks.settle()
            node.synchronize()
            pool._blocks.finish()
            took["drop and let go"] = time.perf_counter() - begin
        node.barrier()
        if node.is_leader:
            begin = time.perf_counter()
            pool._blocks.give_back()
            took["give back"] = time.perf_counter() - begin
        for each in ("allocate", "handle", "open", "drop and let go", "give back"):
            us = slowest(node.comm, took.get(each, 0.0)) / count
            say(node, f"pool: {each}, {count} arrays, {name}", us)
    pool.close()


def time_setup(node, kind):
    """Microseconds of the first, the second and a further window or plan, which stay open."""
    kept = []
    for name, make in (
        ("allocate(8 B)", lambda: node.allocate(1)),
        ("allocate(64 MiB)", lambda: node.allocate(64 * MIB, "u1")),
        ("allocate_each(8 B)", lambda: node.allocate_each(1)),
        ("allocate_each(64 MiB)", lambda: node.allocate_each(64 * MIB, "u1")),
    ):
        took = []
        for _ in range(10):
            window, us = timed(node, make)
            took.append(us)
            kept.append(window)
        closing = [timed(node, kept.pop().close)[1] for _ in range(5)]
        say(
            node,
            f"{kind}: {name}: 1st, 2nd, median of 8; close",
            *took[:2],
            statistics.median(took[2:]),
            statistics.median(closing),
        )
    cart = node.comm.Create_cart([node.size], periods=[True])
    for side in (64, 2048):
        field = node.xp.zeros((side, side))
        make_plan = partial(mpishare.HaloExchange, cart, field, 1, axes=(0,), node=node)
        took = []
        for _ in range(6):
            plan, us = timed(node, make_plan)
            plan.exchange(field)
            took.append(us)
            kept.append(plan)
        say(
            node,
            f"{kind}: HaloExchange, {side}^2: 1st, 2nd, median of 4",
            *took[:2],
            statistics.median(took[2:]),
        )
    node.synchronize()
    while kept:
        kept.pop().close()
    cart.Free()


def use_pools(node):
    """Let the node take its device memory from one pool per rank; return microseconds."""
    from mpishare.backends import cuda_pools, driver
    from mpishare.backends.cuda_memory import CudaMemory

    context, backend = node._context, node._context.backend
    where, ordinal = backend._where, backend.device.ordinal
    own, created = timed(node, lambda: cuda_pools.create_pool(ordinal, where))
    fd, exported = timed(node, lambda: cuda_pools.export_pool(own, where))
    token = context.descriptors.lend(fd)
    tokens = node.comm.allgather(token)
    others = [rank for rank in range(node.size) if rank != node.rank]
    fds, borrowed = timed(
        node, lambda: {r: context.descriptors.borrow(r, tokens[r], 20) for r in others}
    )
    imported, importing = timed(
        node, lambda: {r: cuda_pools.import_pool(fds[r], ordinal, where) for r in others}
    )
    node.barrier()
    context.descriptors.take_back(token)
    for each in (fd, *fds.values()):
        os.close(each)
    say(
        node,
        "driver: create, export, borrow, import a pool",
        created,
        exported,
        borrowed,
        importing,
    )

    def memory_at(address, nbytes, free):
        return CudaMemory(ordinal, address, nbytes, partial(free, address))

    def allocate(nbytes):
        nbytes = max(nbytes, 1)
        address = int(backend.call("cuMemAllocFromPoolAsync", nbytes, own, 0))
        backend.call("cuStreamSynchronize", 0)
        return memory_at(address, nbytes, lambda at: backend.call("cuMemFreeAsync", at, 0))

    def publish(memory):
        return f"{node.rank}:{cuda_pools.export_pointer(memory.address, where).hex()}"

    def open_it(token, nbytes, _):
        rank, _, data = token.partition(":")
        pool = imported[int(rank)]
        return memory_at(pool.open(bytes.fromhex(data)), nbytes, pool.close)

    backend.allocate, backend.publish, backend.open = allocate, publish, open_it
    return own, imported, others, driver


def time_driver(node, own, imported, others, driver):
    """Microseconds per call of the driver."""
    from mpishare.backends import cuda_pools

    backend, count = node._context.backend, 2000
    where = backend._where

    def call(name, *arguments):
        return driver.call(name, *arguments, where=where)

    def each(work, items):
        begin = time.perf_counter()
        result = [work(item) for item in items]
        return result, slowest(node.comm, time.perf_counter() - begin) / max(len(items), 1)

    for nbytes in (4096, MIB):
        blocks, made = each(
            lambda _, n=nbytes: int(call("cuMemAllocFromPoolAsync", n, own, 0)), range(count)
        )
        node.synchronize()
        data, exported = each(lambda at: cuda_pools.export_pointer(at, where), blocks)
        again = [cuda_pools.export_pointer(at, where) for at in blocks[:5]]
        all_data = node.comm.allgather(data)
        first = [each(imported[r].open, all_data[r][:1]) for r in others[:1]]
        rest = [each(imported[r].open, all_data[r][1:]) for r in others[:1]]
        twice = [each(imported[r].open, all_data[r][1:]) for r in others[:1]]
        node.barrier()
        for r in others[:1]:
            for address in rest[0][0]:
                imported[r].close(address)  # one of two: the driver is not asked
        closed = [each(imported[r].close, [*first[0][0], *rest[0][0]]) for r in others[:1]]
        node.barrier()
        _, freed = each(lambda at: call("cuMemFreeAsync", at, 0), blocks)
        node.synchronize()
        reused, remade = each(
            lambda _, n=nbytes: int(call("cuMemAllocFromPoolAsync", n, own, 0)), range(count)
        )
        same = sum(
            cuda_pools.export_pointer(at, where) == dict(zip(blocks, data, strict=True)).get(at)
            for at in reused[:20]
        )
        for at in reused:
            call("cuMemFreeAsync", at, 0)
        node.synchronize()
        node.barrier()
        say(node, f"driver, {nbytes} B: alloc, alloc again, free", made, remade, freed)
        say(
            node,
            "driver: export; import first, next, twice; cuMemFree of it",
            exported,
            *(figures[0][1] for figures in (first, rest, twice, closed) if figures),
        )
        if node.is_leader:
            print(
                f"  export twice alike: {again == data[:5]}; after a free: {same} of 20", flush=True
            )


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with mpishare.Node() as node:
        if node.is_leader:
            print(f"{node.size} ranks, {node.backend}, GPU of this rank: {node.device}", flush=True)
        time_pool(node, count)
        time_setup(node, node.backend)
        on_gpus = node.backend == "cuda"
    if on_gpus:
        with mpishare.Node() as node:
            backend = node._context.backend
            legacy = backend.allocate, backend.publish, backend.open
            own, imported, others, driver = use_pools(node)
            time_driver(node, own, imported, others, driver)
            time_setup(node, "pools")
            backend.allocate, backend.publish, backend.open = legacy


main()

"""A sum over all ranks inside one kernel of Triton: arrays go round a ring by puts with signals.

    mpirun -n 4 python -m mpi4py scripts/examples/30_triton.py

The arrays are of PyTorch. Several programs share out the array, each with slots of its own.
"""

import mpishare

N, BLOCK, PROGRAMS = 4000, 1024, 4

with mpishare.Node() as node:
    window = node.allocate_each(N, signals=2 * PROGRAMS)
    device = int(window.device["self"])  # refused on the host, which has no kernels

    import torch
    import triton
    import triton.language as tl

    from mpishare.device import triton as dev

    @triton.jit
    def ring(d, total, n, block: tl.constexpr):
        right = (dev.rank(d) + 1) % dev.size(d)
        left = (dev.rank(d) + dev.size(d) - 1) % dev.size(d)
        sent, read = 2 * tl.program_id(0), 2 * tl.program_id(0) + 1
        number = (dev.epoch(d, 0) - 1) * (dev.size(d) - 1)
        i = tl.program_id(0) * block + tl.arange(0, block)
        travels = tl.load(total + i, i < n)
        to, mine = dev.at(d, right, tl.float64) + i, dev.at(d, dev.rank(d), tl.float64) + i
        ok = True
        for _ in range(dev.size(d) - 1):
            ok = dev.wait(d, right, read, number) & ok  # it has read what I sent last
            number += 1
            tl.store(to, travels, i < n)
            dev.signal(d, right, sent, number)
            ok = dev.wait(d, left, sent, number) & ok
            travels = tl.load(mine, i < n)
            dev.signal(d, left, read, number)
            tl.store(total + i, tl.load(total + i, i < n) + travels, i < n)

    total = torch.arange(N, dtype=torch.float64, device="cuda") + 1000.0 * node.rank
    node.synchronize()
    for _ in range(2):
        ring[(PROGRAMS,)](device, total, N, block=BLOCK)
    node.synchronize()

    size, i = node.size, torch.arange(N, dtype=torch.float64, device="cuda")
    right = size * (size * i + 500.0 * size * (size - 1))
    if not (total == right).all():
        raise SystemExit(f"rank {node.rank}: WRONG: {total} instead of {right}")
    node.barrier()
    if node.rank == 0:
        print("summed twice, right")

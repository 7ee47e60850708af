"""A channel: one rank computes and streams its frames, the others analyse them as they come.

    mpirun -n 3 python -m mpi4py scripts/examples/07_channel.py

The producer runs ahead by as many frames as there are slots, and never overwrites one in use.
"""

import mpishare

SHAPE, STEPS = (64, 64), 50

with mpishare.Node() as node:
    xp = node.xp
    frames = node.channel(SHAPE, "f4", slots=4)  # the leader produces, all others consume
    if node.rank == frames.producer:
        u = xp.zeros(SHAPE, "f4")
        for step in range(STEPS):
            u += 1  # the simulation
            with frames.put() as slot:  # my stream waits for a free slot; the host does not
                slot[...] = u * step
        frames.end()
    else:
        sums = []
        for slot in frames:  # every consumer gets every frame
            sums.append(slot.sum())  # the slot is given back after this
        right = [(step + 1) * step * SHAPE[0] * SHAPE[1] for step in range(STEPS)]
        if [float(each) for each in sums] != right:
            raise SystemExit(f"rank {node.rank}: WRONG: {sums}")
    node.barrier()
    if node.is_leader:
        print(f"{len(frames.consumers)} consumers got {STEPS} frames each: right")

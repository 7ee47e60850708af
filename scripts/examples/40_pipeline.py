"""A pipeline: each rank is a stage, which takes frames from the one before and passes them on.

    mpirun -n 4 python -m mpi4py scripts/examples/40_pipeline.py

A channel between each two stages; a slow stage holds up those before it, by the number of slots.
"""

import mpishare

LENGTH, FRAMES = 1000, 50

with mpishare.Node() as node:
    last = node.size - 1
    links = [node.channel(LENGTH, slots=2, producer=n, consumers=[n + 1]) for n in range(last)]
    frames = (node.xp.full(LENGTH, float(step)) for step in range(FRAMES))
    sums = []
    for frame in links[node.rank - 1] if node.rank else frames:
        if node.rank < last:
            with links[node.rank].put() as slot:
                slot[...] = 2 * frame + 1  # the work of this stage
        else:
            sums.append(frame.sum())
    if node.rank < last:
        links[node.rank].end()
    else:
        right = [LENGTH * (2**last * (step + 1) - 1) for step in range(FRAMES)]
        if [float(each) for each in sums] != right:
            raise SystemExit(f"WRONG: {sums}")
        print(f"{FRAMES} frames through {last} stages: right")

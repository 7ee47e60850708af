"""Nine tensors from a producer to a consumer, each in a place of its own, and each intact.

    mpirun -n 2 python -m mpi4py scripts/examples/10_nine_tensors.py

By hand, with one handle per tensor, some drivers empty the memory when its handle is taken after
the data was written, and small tensors share a block. `share_all` allocates, exports, then
writes, for all of them at once.
"""

import mpishare

PRODUCER, COUNT = 0, 9


def tensor(number, xp):
    """The tensor with this number: its number, and twice that."""
    return xp.asarray([number, 2 * number], dtype="i4")


with mpishare.Node() as node:
    windows = node.share_all(
        lambda: [tensor(number, node.xp) for number in range(1, COUNT + 1)], owner=PRODUCER
    )
    received = [window.array.tolist() for window in windows]  # here, on every rank
    right = [[number, 2 * number] for number in range(1, COUNT + 1)]
    if received != right:
        raise SystemExit(f"rank {node.rank}: WRONG: {received}")
    node.barrier()
    if node.is_leader:
        print(f"{node.size} ranks have {received[0]} to {received[-1]}: right")

"""All weights of a model at once: one rank loads them, every rank has windows of them.

    mpirun -n 2 python -m mpi4py scripts/examples/34_share_all.py

`share_all` takes dicts, lists and tuples within each other, such as PyTorch's state_dict, and makes
one agreement and one allocation for all arrays.
"""

import numpy as np

import mpishare

LAYERS = 50


def load(xp):
    """The weights of a model: the first and the last layer share a table."""
    table = xp.arange(12.0).reshape(4, 3)
    layers = [{"w": xp.full((3, 3), float(n)), "b": xp.full(3, -float(n))} for n in range(LAYERS)]
    return {"embedding": table, "layers": layers, "head": table}


with mpishare.Node() as node:
    # Called on the leader alone.
    windows = node.share_all(lambda: load(node.xp))
    if windows["head"] is not windows["embedding"]:
        raise SystemExit(f"rank {node.rank}: WRONG: the table was shared twice")
    x = node.xp.ones(3)
    for number, layer in enumerate(windows["layers"]):
        y = layer["w"].array @ x + layer["b"].array
        if not np.allclose(y.tolist(), 2 * number):
            raise SystemExit(f"rank {node.rank}: WRONG: layer {number} gives {y}")
    node.barrier()
    if node.is_leader:
        print(f"{2 * LAYERS + 1} arrays on {node.size} ranks, one copy of each: right")

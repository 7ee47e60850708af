"""A row of ranks whose last and first are neighbors.

Apart from `halos`, whose imports would cost each rank of a scene a fifth of its start.
"""

import mpishare


def ring(node, /, fields, width=1, comm=None, **options) -> mpishare.HaloExchange:
    """A plan for a row of ranks, by default all, whose last and first are neighbors.

    With `node=None` on the node that mpishare keeps for them.
    """
    comm = comm or node.comm
    options = {"dims": (comm.size,), "periods": True, "node": node, **options}
    return mpishare.HaloExchange(comm, fields, width, **options)


def beside(node) -> tuple[int, int]:
    """The neighbors on a ring, the lower one first."""
    return (node.rank - 1) % node.size, (node.rank + 1) % node.size

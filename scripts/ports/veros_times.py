"""Veros' exchange of ghost cells by messages and by mpishare, in turns: bits and times.

PYTHONPATH=../lib mpirun -n 2 python -m mpi4py veros_times.py [ROUNDS]

Needs Veros with docs/ports/veros.patch; messages go by the same file without the plan.
"""

from pathlib import Path

import numpy as np
from in_turns import comm, compare, nothing, print_head
from veros import distributed
from veros import runtime_settings as settings

GRIDS = (30, 42, 15), (240, 42, 15), (240, 240, 30)  # cells of a rank
WITHOUT = {}  # what the module defines without the plan
PLAN = 'if rs.backend == "numpy" and d1'
exec(Path(distributed.__file__).read_text().replace(PLAN, "if False and d1"), WITHOUT)
WAYS = {"messages": WITHOUT["exchange_overlap"], "mpishare": distributed.exchange_overlap}


def use(way):
    """Let exchanges go by messages, or by mpishare."""
    global exchange_overlap
    exchange_overlap = WAYS[way]


def exchange(cells):
    """Return an exchange of a field with ghosts, and the field."""
    x, y, z = cells
    field = np.random.default_rng(comm.rank).random((x + 4, y + 4, z))
    call = lambda: exchange_overlap(field, ("xt", "yt", "zt"), cyclic=True)  # noqa: E731
    return call, [call()]


settings.backend = "numpy"
settings.loglevel = "error"
print_head("Veros", WAYS, "numpy", "veros")
for ranks in (comm.size, 1), (1, comm.size):
    object.__setattr__(settings, "num_proc", ranks)  # it refuses a second grid
    distributed.HALO_EXCHANGES.clear()
    for cells in GRIDS:
        what = f"{' x '.join(map(str, cells))} cells of {' x '.join(map(str, ranks))} ranks"
        compare(what, WAYS, exchange, cells, use=use, drain=nothing)

"""Plans that name the memory of their fields, and so the node that is kept for them."""

from functools import partial

import numpy as np
import pytest

from mpishare import (
    Allreduce,
    HaloExchange,
    Layout,
    MismatchError,
    NeighborExchange,
    Redistribute,
    RowExchange,
    UnsupportedError,
)

CELLS = Layout((4, 3), float)


def plans(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    return {
        "halo": partial(HaloExchange, comm, CELLS, 1, dims=(comm.size, 1), periods=True),
        "neighbors": partial(NeighborExchange, comm, {right: [1]}, {left: [0]}, CELLS),
        "ids": partial(
            NeighborExchange.from_global_ids, comm, 4 * comm.rank + np.arange(4), 4, CELLS
        ),
        "sum": partial(Allreduce, comm, CELLS),
        "redistribute": partial(Redistribute, comm, (comm.size, comm.size), 0, 1),
        "rows": partial(RowExchange, comm, ["f8"]),
    }


@pytest.mark.parametrize("what", ["halo", "neighbors", "ids", "sum", "redistribute"])
def test_a_plan_of_layouts_in_host_memory(comm, what):
    """Its node is on the host, also where there are GPUs."""
    with plans(comm)[what](backend="host") as plan:
        if what == "sum":
            u = np.ones((4, 3))
            plan.reduce(u)
            assert (u == comm.size).all()
        else:
            assert set(plan.routes.values()) <= {"host"}
            call = plan.forward if what == "redistribute" else plan.exchange
            call(np.zeros((1, comm.size) if what == "redistribute" else (4, 3)))


@pytest.mark.parametrize("what", ["halo", "neighbors", "ids", "sum", "redistribute", "rows"])
def test_a_backend_that_there_is_not(comm, what):
    with pytest.raises(ValueError, match=r"backend must be one of .*, not 'gpu'"):
        plans(comm)[what](backend="gpu")


@pytest.mark.ranks(min=2)
def test_ranks_that_differ(comm):
    with pytest.raises(MismatchError, match="host memory"):
        plans(comm)["halo"](backend="auto" if comm.rank else "host")


def test_gpu_memory_without_a_gpu(host_node, comm):
    with pytest.raises(UnsupportedError, match="the fields are in GPU memory"):
        plans(comm)["halo"](backend="cuda", node=host_node)

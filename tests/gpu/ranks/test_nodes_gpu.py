"""Halves of the ranks as two nodes: plans that mix messages with the routes of a node."""

import time
from contextlib import nullcontext

import pytest
from mpi4py import MPI

import mpishare
from mpishare.setup import create
from tests.helpers.halos import (
    Kind,
    arrays,
    check,
    encode,
    even_case,
    make_fields,
    plan,
    put,
    random_plan,
)

WORLD = MPI.COMM_WORLD
HALF = -(-WORLD.size // 2)
TWO = pytest.mark.ranks(min=2)


@pytest.fixture(scope="module")
def half():
    """The node of one half of the ranks, which take the other half for another machine."""
    place = create.place
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(create, "place", lambda: [*place(), WORLD.rank // HALF])
        node = mpishare.Node(WORLD, timeout_s=30)
    assert node.backend == "cuda"
    with node:
        yield node


def is_message(route):
    return route.startswith("mpi")


@TWO
def test_random_plans(half):
    """Every ghost; messages to the other half, and no other way there."""
    for seed in range(10):
        routes = random_plan(half, WORLD, seed)
        for rank, route in routes.items():
            assert is_message(route) == (rank not in half.ranks)
    report = half.report()
    assert report.gpu_messages is not None
    assert "messages to other nodes go" in str(report)


@TWO
def test_the_memory_of_messages_can_be_required(half):
    """Whoever requires GPU memory learns why it is not used; who requires messages gets any."""
    case = even_case((WORLD.size,), True, 5)
    fields = make_fields(half, case, WORLD.rank, [Kind()])
    inside = ("fused", "copy", "pinned")
    with plan(WORLD, case, arrays(fields), node=half, require=(*inside, "mpi")):
        takes = half.report().gpu_messages == ""
    refused = pytest.raises(mpishare.UnsupportedError, match="refuses rank")
    with (
        nullcontext() if takes else refused,
        plan(WORLD, case, arrays(fields), node=half, require=(*inside, "mpi-gpu")) as halo,
    ):
        seen = WORLD.allgather(list(halo.routes.values()))
        assert any("mpi-gpu" in routes for routes in seen)


@pytest.mark.ranks(min=4, max=4)
def test_messages_do_not_hold_up_fused_neighbors(half):
    """Ghosts of my node are there while the other node has not even called."""
    import cupy

    case = even_case((2, 2), True, 6)
    fields = make_fields(half, case, WORLD.rank, [Kind("i8")])
    with plan(WORLD, case, arrays(fields), node=half) as halo:
        (mate,) = set(half.ranks) - {WORLD.rank}
        if halo.routes[mate] != "fused":
            pytest.skip(f"the ranks of a node reach each other by {halo.routes[mate]}")
        for step in (1, 2):
            put(fields, step)
            if WORLD.rank < HALF:
                halo.start()
                # The ghosts above and below the owned cells along axis 1 are those of my mate.
                ghost = fields[0].array[1:-1, 0]
                numbers = case.cells[WORLD.rank][1:-1, 0]
                right = cupy.asarray(encode(numbers, "i8", step))
                side = cupy.cuda.Stream(non_blocking=True)
                deadline = time.monotonic() + 10
                with side:
                    while not bool((ghost == right).all()):
                        assert time.monotonic() < deadline
            WORLD.Barrier()
            if WORLD.rank >= HALF:
                halo.start()
            halo.wait()
            check(fields, step)

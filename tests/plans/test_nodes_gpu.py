"""Halves of the ranks as two nodes: plans that mix messages with the routes of a node."""

import time
from contextlib import nullcontext

import pytest

import mpishare
from mpishare.backends import nccl
from mpishare.runtime import places
from tests.helpers.counted import Counted
from tests.helpers.exact import factors, part, rounded_sum
from tests.helpers.halos import (
    Kind,
    arrays,
    check,
    encode,
    even_case,
    exchanging,
    make_fields,
    put,
    random_plan,
)
from tests.helpers.halves import HALF, WORLD, device_of_half, node_of_half

pytestmark = pytest.mark.ranks(min=2)


def no_nccl():
    """Messages between nodes are those of MPI then."""
    raise mpishare.UnsupportedError("no NCCL here")


@pytest.fixture(scope="module")
def half():
    """The node of one half of the ranks, which take the other half for another machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl, "load", no_nccl)
        with node_of_half(device_of_half()) as node:
            yield node


def is_message(route):
    return route.startswith("mpi")


def test_random_plans(half):
    """Every ghost; messages to the other half, and no other way there."""
    for seed in range(10):
        routes = random_plan(half, WORLD, seed)
        for rank, route in routes.items():
            assert is_message(route) == (rank not in half.ranks)
    report = half.report()
    assert report.gpu_messages is not None
    assert "messages to other nodes go" in str(report)


def test_the_memory_of_messages_can_be_required(half):
    """Whoever requires GPU memory learns why it is not used; who requires messages gets any."""
    case = even_case((WORLD.size,), True, 5)
    inside = ("fused", "copy", "pinned")
    with exchanging(half, case, require=(*inside, "mpi"), comm=WORLD):
        takes = half.report().gpu_messages == ""
    refused = pytest.raises(mpishare.UnsupportedError, match="refuses mpi among ranks")
    with (
        nullcontext() if takes else refused,
        exchanging(half, case, require=(*inside, "mpi-gpu"), comm=WORLD) as (halo, _),
    ):
        seen = WORLD.allgather(list(halo.routes.values()))
        assert any("mpi-gpu" in routes for routes in seen)


def slabs(node, kind):
    case = even_case((WORLD.size,), True, 5, ((1, 1),))
    return exchanging(node, case, [kind], comm=WORLD, axes=(0,))


def test_the_host_waits_for_the_stream_before_it_sends(half, cupy):
    """Cells arrive as they are written last, and ghosts are read before that."""
    counted = Counted("")
    stream = cupy.cuda.Stream(non_blocking=True)
    with slabs(half, Kind("i8", "C", (1000,))) as (halo, [field]), stream:
        numbers = cupy.asarray(field.numbers)
        owned, seen = field.owned, []
        for step in range(1, 30):
            if (step + WORLD.rank) % 3:
                counted.idle(300)
            field.array[owned] = numbers[owned] + step
            if step % 2:
                halo.exchange(field.array, stream=stream if step % 4 == 1 else None)
            else:
                halo.start(field.array)
                halo.wait()
            if step % 3:
                counted.idle(300)
            seen.append(cupy.count_nonzero(field.array - numbers - step))
        half.synchronize()
    assert [int(each) for each in seen] == [0] * len(seen)


@pytest.mark.ranks(min=4, max=4)
def test_nodes_that_share_gpus_leave_each_other_room(monkeypatch):
    """Kernels that wait would fill a GPU that those of another node need, and these theirs."""
    place = places.place
    monkeypatch.setattr(places, "place", lambda: [*place(), WORLD.rank // HALF])
    case = even_case((2, 2), True, 2)
    with mpishare.Node(WORLD, timeout_s=20) as node:  # each node on all GPUs
        if not node.device.mps:
            pytest.skip("these ranks take turns on their GPUs, or have one each")
        kind = Kind("f8", "C", (1 << 19,))
        fields = make_fields(node, case, [kind], rank=WORLD.rank)
        widths = ((0, 0), (1, 1))
        options = {"dims": (2, 2), "periods": True, "axes": (0, 1)}
        halo = mpishare.HaloExchange(WORLD, arrays(fields), widths, node=node, **options)
        for _ in range(200):
            halo.exchange(*arrays(fields))
        node.synchronize()
        halo.close()


@pytest.mark.ranks(min=2, max=4)
def test_messages_do_not_hold_up_fused_neighbors(half, cupy):
    """Ghosts of my node are there while the other node has not even called.

    With a rank per node they are of its own cells.
    """
    if WORLD.size == 3:
        pytest.skip("the nodes must be alike")
    case = even_case((2, HALF), True, 6)
    with exchanging(half, case, [Kind("i8")], comm=WORLD) as (halo, fields):
        mate = half.ranks[(half.rank + 1) % half.size]
        if halo.routes[mate] != ("copy" if mate == WORLD.rank else "fused"):
            pytest.skip(f"the ranks of a node reach each other by {halo.routes[mate]}")
        for step in (1, 2):
            put(fields, step)
            if WORLD.rank < HALF:
                halo.start(*arrays(fields))
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
                halo.start(*arrays(fields))
            halo.wait()
            check(fields, step)


def test_exact_dots_over_nodes(half, cupy):
    """By messages of MPI, again and again, of which no rank's sum may meet another's."""
    x, y = factors("ties", 1, 4 * WORLD.size)
    wanted = rounded_sum([(x, y)], "f8")
    parts = [cupy.asarray(part(each, 3, WORLD.rank, WORLD.size)) for each in (x, y)]
    with mpishare.Allreduce(WORLD, mpishare.Layout(1, "f8"), exact=True, node=half) as total:
        for _ in range(300):
            assert total.dot(*parts).get().tobytes() == wanted.tobytes()

"""Rows between halves of the ranks that take each other for another machine, on GPUs."""

import numpy as np
import pytest

import mpishare
from mpishare import CapacityError, Migration, RowExchange, UnsupportedError
from tests.helpers.captures import captured
from tests.helpers.halves import WORLD, device_of_half, node_of_half, require_nccl
from tests.helpers.random_rows import check_exchanges, check_migrations

pytestmark = pytest.mark.ranks(min=2)
NEXT = (WORLD.rank + 1) % WORLD.size
BY_MPI = "fused", "copy", "mpi"


@pytest.fixture(scope="module")
def half():
    with node_of_half(device_of_half()) as node:
        yield node


@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("route", ["nccl", "mpi"])
@pytest.mark.parametrize("seed", range(10))
def test_random_rows(half, seed, route, stable):
    """Within a half by kernels, to the other one by messages, also in larger slots."""
    if route == "nccl":
        require_nccl()
    require = BY_MPI if route == "mpi" else None
    for swap in (
        check_exchanges(half, WORLD, seed + 10 * stable, require=require),
        check_migrations(half, WORLD, seed, stable=stable, require=require),
    ):
        for rank, used in swap.routes.items():
            assert used == route if rank not in half.ranks else used in ("fused", "copy")
        swap.close()


def ring(half, room, **options):
    return RowExchange(WORLD, ["f8"], room, dims=[WORLD.size], periods=True, node=half, **options)


@pytest.mark.parametrize("route", ["nccl", "mpi"])
def test_calls_that_come_again(half, cupy, route):
    """With the same arrays and other ints, also while slots grow."""
    if route == "nccl":
        require_nccl()
    x, sent = [cupy.zeros(400)], np.arange(400.0)
    with ring(half, 5, require=BY_MPI if route == "mpi" else None) as swap:
        low, high = swap.peers
        out = {side: [cupy.zeros(200)] for side in swap.peers}
        for step, n in enumerate((3, 3, 5, 9, 9, 200, 0, 4, 4)):
            x[0][:] = cupy.asarray(sent + 1000 * WORLD.rank + 10_000 * step)
            swap.start(x, {low: (0, n), high: (n, 2 * n)})
            if step % 3 == 0:
                assert swap.counts() == {low: n, high: n}
            swap.wait(out)
            before = sent[n : 2 * n] + 1000 * ((WORLD.rank - 1) % WORLD.size)
            assert (out[low][0][:n].get() == before + 10_000 * step).all()
            assert (out[high][0][:n].get() == sent[:n] + 1000 * NEXT + 10_000 * step).all()
        for n in (3, 300):  # without arrays
            swap.start(x, {low: (0, n)})
            assert swap.counts() == {low: 0, high: n}
            swap.wait()
            half.synchronize()
            assert swap._engine.late_elsewhere("wait") is None
            assert len(swap.received(high)[0]) == n


def test_a_captured_migration(half, stream, cupy):
    """All rows go round, by goals that only the GPU knows, and none is lost."""
    require_nccl()
    count, step = cupy.array(1000, "i8"), cupy.array(0, "i8")
    ids = cupy.arange(4000) * WORLD.size + WORLD.rank
    to, goals = cupy.full(4000, WORLD.rank, "i4"), cupy.zeros(4000, "i8")
    with RowExchange(WORLD, ["i8", "f8"], 1000, node=half) as swap:
        move, x = Migration(swap), 0.5 * ids

        def advance():
            cupy.add(step, 1, out=step)
            cupy.add(ids, step, out=goals)
            cupy.remainder(goals, WORLD.size, out=goals)
            to[...] = goals
            move.migrate([ids, x], to, count)

        advance()
        replayed = mpishare.capture(half, advance)
        for _ in range(30):
            replayed()
        half.synchronize(stream)
        move.check()
        assert int(count) == 1000
        first = (WORLD.rank - int(step)) % WORLD.size
        right = np.arange(1000) * WORLD.size + first
        assert (np.sort(ids[:1000].get()) == right).all()
        assert (x[:1000] == 0.5 * ids[:1000]).all()
        replayed.close()


def test_captured_rows_beyond_a_slot(half, stream, cupy):
    """The first ones come, and both ranks are told; called, too, as graphs have the slot."""
    require_nccl()
    x, n = cupy.arange(50.0) + 100 * WORLD.rank, cupy.array(5, "i8")
    out, count = [cupy.zeros(200)], cupy.zeros((), "i8")
    with ring(half, 7) as swap:
        far = [k for k in swap.peers if swap._form.places[k] in {*swap._engine._far._keys}]
        (low, high), before = swap.peers, (WORLD.rank - 1) % WORLD.size

        def advance():
            count.fill(0)
            swap.start([x], {low: (0, 2), high: (0, n)})
            swap.wait(out, at="append", count=count)
            cupy.add(n, 1, out=n)

        def check(came):
            right = [*(100 * before + np.arange(came)), *(100 * NEXT + np.arange(2))]
            assert out[0][: int(count)].get().tolist() == right

        replayed = mpishare.capture(half, advance)
        for sent in (5, 6, 7):
            replayed()
            assert swap.counts() == {low: sent, high: 2}
            check(sent)
        for call in (replayed, advance):
            call()
            half.synchronize(stream)
            check(7 if low in far else int(n) - 1)
            if far:
                with pytest.raises(CapacityError, match="than a slot of room=7 holds"):
                    swap.counts()
        replayed.close()


def test_slots_grow_with_migrations(half, cupy):
    """The first call takes what has room, the third all: by then the peer has room for it."""
    require_nccl()
    to, count = cupy.full(400, NEXT, "i4"), cupy.array(200, "i8")
    columns = [cupy.arange(400.0) + 1000 * WORLD.rank]
    with RowExchange(WORLD, ["f8"], 8, node=half) as swap:
        move = Migration(swap)
        for left in (192, 184, 0):
            move.migrate(columns, to, count)
            assert int(move.left) == left or NEXT in half.ranks
        assert int(count) == 200
        assert swap.sent()[NEXT] > 8


@pytest.mark.parametrize("route", ["mpi", "mpi-gpu"])
def test_what_a_capture_refuses(half, stream, cupy, route, monkeypatch):
    """By name, on all ranks; the plan goes on."""
    if route == "mpi-gpu":
        monkeypatch.setenv("MPISHARE_ROUTE", route)
        with pytest.raises(UnsupportedError, match=f"MPISHARE_ROUTE={route}: rows travel"):
            RowExchange(WORLD, ["f8"], node=half)
        return
    x, to, count = cupy.arange(8.0), cupy.full(8, WORLD.rank, "i4"), cupy.array(4)
    with RowExchange(WORLD, ["f8"], node=half, require=BY_MPI) as swap:
        move = Migration(swap)
        for call in (lambda: swap.start([x], {}), lambda: move.migrate([x], to, count)):
            said = r"routes \['mpi'.*\] need the host at every call"
            with pytest.raises(UnsupportedError, match=said), captured(stream):
                call()
        move.migrate([x], to, count)
        assert int(count) == 4


def test_inside_a_node_nccl_can_be_forced(half, monkeypatch):
    require_nccl()
    monkeypatch.setenv("MPISHARE_ROUTE", "nccl")
    with check_exchanges(half, WORLD, 3) as swap:
        assert {*swap.routes.values()} <= {"nccl", "copy"}

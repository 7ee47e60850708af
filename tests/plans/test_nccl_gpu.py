"""Halves of the ranks as two nodes between which NCCL takes the cells, on the stream."""

from functools import partial

import numpy as np
import pytest

import mpishare
from mpishare.backends import nccl
from tests.helpers.autograd import functions
from tests.helpers.captures import skip_where_ranks_take_turns
from tests.helpers.halos import (
    Kind,
    arrays,
    check,
    even_case,
    exchange_step,
    exchanging,
    make_fields,
    random_plan,
)
from tests.helpers.halves import HALF, WORLD, node_of_half, require_nccl
from tests.helpers.reductions import folded, laid_out, on_host, values
from tests.helpers.rings import ring

pytestmark = pytest.mark.ranks(min=2)


@pytest.fixture(scope="module")
def half():
    """The node of one half of the ranks, which take the other half for another machine."""
    import cupy

    require_nccl()
    with node_of_half(WORLD.rank % cupy.cuda.runtime.getDeviceCount()) as node:
        yield node


@pytest.fixture
def half_of_sums(half):
    """That node where its sums are those of kernels."""
    skip_where_ranks_take_turns(half)
    return half


def test_random_plans(half):
    """Every ghost, called in one piece and in halves."""
    for seed in range(10):
        for rank, route in random_plan(half, WORLD, seed).items():
            assert (route == "nccl") == (rank not in half.ranks)


@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_sums_go_back(half, cupy, wire):
    case = even_case((WORLD.size,), True, 4)
    with exchanging(half, case, [Kind("f8")], comm=WORLD, wire=wire) as (halo, fields):
        (field,) = arrays(fields)
        for _ in range(3):
            field[...] = 1
            halo.accumulate(field)
            half.synchronize()
            ends = cupy.asnumpy(field[fields[0].owned])
            assert ends.max() >= 2
            total = WORLD.allreduce(float(cupy.asnumpy(field).sum()))
            assert total == WORLD.allreduce(float(field.size))
        halo.exchange(field)
        right = field.copy()
        for _ in range(3):
            field[...] = 1
            halo.accumulate(field, give_back=True)
            assert bool((field == right).all())


def test_messages_of_mpi_can_be_asked_for(half, monkeypatch):
    case = even_case((WORLD.size,), True, 5)
    monkeypatch.setenv("MPISHARE_ROUTE", "mpi-host")
    with exchanging(half, case, comm=WORLD) as (halo, fields):
        assert "nccl" not in halo.routes.values()
        exchange_step(halo, fields, 1)


def test_inside_a_node_it_can_be_forced(half, monkeypatch):
    monkeypatch.setenv("MPISHARE_ROUTE", "nccl")
    case = even_case((WORLD.size,), True, 5)
    with exchanging(half, case, comm=WORLD) as (halo, fields):
        assert {*halo.routes.values()} == {"nccl"}
        for step in range(1, 4):
            exchange_step(halo, fields, step)


def test_strided_faces_of_a_field_at_an_odd_address(half):
    """They are packed in units that the address allows."""
    field = half.xp.full(1 + 3 * 6 * 8, float(WORLD.rank))[1:].reshape(3, 6, 8)
    before, after = ((WORLD.rank + step) % WORLD.size for step in (-1, 1))
    with ring(half, [field], comm=WORLD, axes=1) as halo:
        halo.exchange(field)
        assert (field[:, 0] == before).all()
        assert (field[:, -1] == after).all()


@pytest.mark.parametrize("shapes", [[(6, 0)], [(6, 0), (6, 3)]])
def test_fields_without_cells(half, shapes):
    """Alone, or beside others; in both directions."""
    fields = [half.xp.full(shape, WORLD.rank) for shape in shapes]
    before = (WORLD.rank - 1) % WORLD.size
    with ring(half, fields, comm=WORLD, axes=0) as halo:
        halo.exchange(*fields)
        assert (fields[-1][0] == before).all()
        halo.accumulate(*fields, give_back=True)
        assert (fields[-1][0] == 2 * before).all()


@pytest.mark.parametrize("form", ["C", "offset"])
def test_large_faces_beside_strided_and_small_ones(half, cupy, form):
    """Large ones stay where they are, unless a field begins at an odd address or is in a pool."""
    case = even_case((WORLD.size,), True, 4)
    kinds = [Kind("f8", "C", (40_000,)), Kind("f8", "F", (40_000,)), Kind("f4", form, (3,))]
    with exchanging(half, case, kinds, comm=WORLD, axes=(0,)) as (halo, fields):
        with cupy.cuda.using_allocator(cupy.cuda.malloc_async):
            of_pool = make_fields(half, case, kinds, rank=WORLD.rank)
        for step in range(1, 9):  # called, and replayed; on one rank alone with others
            chosen = of_pool if (step + WORLD.rank) % 4 == 0 else fields
            exchange_step(halo, chosen, step)
            captured = mpishare.capture(half, partial(halo.exchange, *arrays(chosen)))
            captured()
            check(chosen, step)


def test_large_messages_are_no_graphs_where_nccl_maps_any_memory(half, monkeypatch):
    monkeypatch.setenv("NCCL_LEGACY_CUDA_REGISTER", "1")
    assert nccl.most_captured_alone() == nccl.ANY_NBYTES
    kind, case = Kind("f8", "C", (40_000,)), even_case((WORLD.size,), True, 4)
    with exchanging(half, case, [kind], comm=WORLD, axes=(0,)) as (halo, fields):
        for step in range(1, 5):
            exchange_step(halo, fields, step)
        assert not halo._forward._launches[0].whole.handles


@pytest.mark.parametrize("op", ["sum", "max"])
def test_reductions_are_folded_in_the_order_of_nodes(half_of_sums, op):
    """To the bit, of any form, small and shared."""
    groups = [range(HALF), range(HALF, WORLD.size)]
    cases = [("f8", (40_001,)), ("f2", (3, 7)), ("i4", (300, 999)), ("f8", ()), ("f8", (1,))]
    for at, (dtype, shape) in enumerate(cases):
        parts = [[values(dtype, shape, rank, at) for rank in group] for group in groups]
        right = folded(op, [folded(op, part) for part in parts])
        mine = values(dtype, shape, WORLD.rank, at)
        for form in ("C", "strided", "F"):
            field = laid_out(half_of_sums.xp, mine, form)
            with mpishare.Allreduce(WORLD, field, op, node=half_of_sums) as total:
                assert total._engine.reaches_nodes
                for _ in range(3):
                    field[...] = half_of_sums.xp.asarray(mine)
                    total.reduce(field)
                    assert on_host(field).tobytes() == right.tobytes()


def test_large_sums_in_any_memory(half_of_sums, cupy):
    """Where NCCL maps memory in captures, also if one rank launches a graph and another calls."""
    each = [values("f8", (40_001,), rank, 0) for rank in range(WORLD.size)]
    right = folded("sum", [folded("sum", each[:HALF]), folded("sum", each[HALF:])])
    mine = cupy.asarray(each[WORLD.rank])
    plain = cupy.empty_like(mine)
    with cupy.cuda.using_allocator(cupy.cuda.malloc_async):
        of_pool = cupy.empty_like(mine)
    with mpishare.Allreduce(WORLD, plain, node=half_of_sums) as total:
        for turn in range(12):
            x = of_pool if (turn + WORLD.rank) % 4 == 0 else plain
            x[...] = mine
            total.reduce(x)
            assert on_host(x).tobytes() == right.tobytes()
        for x in (of_pool, plain):
            reduce = mpishare.capture(half_of_sums, partial(total.reduce, x))
            for _ in range(4):
                x[...] = mine
                reduce()
                assert on_host(x).tobytes() == right.tobytes()


def test_sums_and_dots_are_captured(half_of_sums, cupy):
    x = cupy.full(1000, WORLD.rank + 1.0)
    out = cupy.zeros(())
    with mpishare.Allreduce(WORLD, x, node=half_of_sums) as total:

        def step():
            x[...] = WORLD.rank + 1.0
            total.dot(x, x, out=out)
            total.reduce(x)

        step()
        replayed = mpishare.capture(half_of_sums, step)
        numbers = range(1, WORLD.size + 1)
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            step()
            step()
            graph = stream.end_capture()
            for replay in (replayed, graph.launch) * 10:
                out[...] = 0
                replay()
            assert float(out) == 1000 * sum(number**2 for number in numbers)
            assert bool((x == sum(numbers)).all())


@pytest.mark.parametrize("cells", [4, 300])
def test_a_loop_over_nodes(half_of_sums, cupy, cells):
    """In one launch where no network is between them, else run by run; of any count of sums."""
    case, kind = even_case((WORLD.size,), True, 3), Kind("f8", "C", (cells,))
    left, most, norm = cupy.zeros(1, "i8"), cupy.zeros(5, "i4"), cupy.zeros(1)
    with (
        exchanging(half_of_sums, case, [kind], comm=WORLD, axes=(0,)) as (halo, fields),
        mpishare.Allreduce(WORLD, norm, node=half_of_sums) as total,
        mpishare.Allreduce(WORLD, most, "max", node=half_of_sums) as greatest,
    ):
        (field,) = arrays(fields)

        def step(field, left, most, norm):
            halo.exchange(field)
            field[1:-1] = field[1:-1] + field[:-2]
            norm[0] = field[1, 0]
            total.reduce(norm)
            most[...] = left + WORLD.rank
            greatest.reduce(most)
            left -= 1

        solve = mpishare.capture(
            half_of_sums, step, until=lambda f, left, m, n: left <= 0, at_most=50
        )
        for count in (9, 20):
            numbers = np.zeros((WORLD.size, 5))
            numbers[:, 1:-1] = np.arange(3 * WORLD.size).reshape(-1, 3)
            field[...] = cupy.asarray(numbers[WORLD.rank])[:, None]
            left[...] = count
            solve(field, left, most, norm)
            for _ in range(count):
                numbers[:, 0] = np.roll(numbers[:, -2], 1)
                numbers[:, -1] = np.roll(numbers[:, 1], -1)
                numbers[:, 1:-1] += numbers[:, :-2]
            assert int(solve.iterations[0]) == count
            assert bool((field == cupy.asarray(numbers[WORLD.rank])[:, None]).all())
            assert float(norm[0]) == numbers[:, 1].sum()
            assert most.tolist() == [WORLD.size] * 5
        solve.close()


def test_a_program_of_pytorch(half_of_sums):
    """On one of its streams: called, again, and captured; and a gradient."""
    torch = pytest.importorskip("torch")
    place = torch.device("cuda", half_of_sums.device.ordinal)
    whole = np.random.default_rng(5).integers(-9, 9, 4 * WORLD.size).astype(float)
    mine = slice(4 * WORLD.rank, 4 * WORLD.rank + 4)
    u = torch.zeros(6, dtype=torch.float64, device=place)
    norm = torch.zeros(1, dtype=torch.float64, device=place)
    torch.cuda.synchronize(place)
    with (
        ring(half_of_sums, u, comm=WORLD) as halo,
        mpishare.Allreduce(WORLD, norm, node=half_of_sums) as total,
    ):

        def step(u, norm):
            halo.exchange(u)
            u[1:-1] = 0.25 * u[:-2] + 0.5 * u[1:-1] + 0.25 * u[2:]
            norm[0] = (u[1:-1] ** 2).sum()
            total.reduce(norm)

        captured = mpishare.capture(half_of_sums, step)
        with torch.cuda.stream(torch.cuda.Stream(place)):
            u[1:-1] = torch.tensor(whole[mine], device=place)
            for each in (*[step] * 4, *[captured] * 4):
                each(u, norm)
                whole = 0.25 * np.roll(whole, 1) + 0.5 * whole + 0.25 * np.roll(whole, -1)
                assert u[1:-1].tolist() == whole[mine].tolist()
                assert float(norm) == pytest.approx((whole**2).sum(), rel=1e-14)
        captured.close()
        exchange, _, _ = functions(torch)
        x = torch.ones(6, dtype=torch.float64, device=place, requires_grad=True)
        with torch.autograd.set_multithreading_enabled(False):
            (3 * exchange.apply(x, halo)).sum().backward()
        assert x.grad.tolist() == [0, 6, 3, 3, 6, 0]

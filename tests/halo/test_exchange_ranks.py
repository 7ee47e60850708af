"""Halos: every ghost holds its owner's cell after every step, and nothing else is written."""

import itertools
import logging

import numpy as np
import pytest

import mpishare
from mpishare import MismatchError, UnsupportedError
from tests.helpers.halos import (
    POISON,
    Case,
    Kind,
    arrays,
    even_case,
    exchange_step,
    make_cart,
    make_fields,
    plan,
    random_case,
    random_plan,
    some,
)
from tests.helpers.stage import shared_bytes

TWO = pytest.mark.ranks(min=2)
PLAIN = (Kind(),)
KINDS_OF_FOUR = [Kind("f8", others=(4,), axes=(0, 1)), Kind("i1", "F", (4,), (0, 1))]


def grids(size, naxes):
    """Every grid of that many ranks."""
    return [
        dims
        for dims in itertools.product(range(1, size + 1), repeat=naxes)
        if np.prod(dims) == size
    ]


def step_by_step(node, comm, case, kinds=PLAIN, steps=3, **options):
    """Make the plan; exchange and check some steps."""
    fields = make_fields(node, case, comm.rank, list(kinds))
    options = {"axes": fields[0].kind.axes, "node": node, **options}
    with plan(comm, case, arrays(fields), **options) as halo:
        for step in range(steps):
            exchange_step(halo, fields, 10 * step)
        return halo


# --- any plan there is


@pytest.mark.parametrize("naxes", [1, 2, 3, 4])
def test_random_plans(node, every_route, naxes):
    for seed in range(some(node, 12 if every_route in ("copy", "pinned") else 8)):
        routes = random_plan(node, node.comm, seed, naxes=naxes, odd=False)
        others = {found for rank, found in routes.items() if rank != node.rank}
        if every_route:
            assert others <= {every_route}
        elif node.backend == "host":
            assert set(routes.values()) <= {"host"}


@pytest.mark.parametrize("naxes", [1, 2, 3, 4])
def test_random_plans_on_the_host(host_node, route, naxes):
    """With what CuPy has not: odd dtypes, arrays that are not aligned."""
    for seed in range(100, 106):
        random_plan(host_node, host_node.comm, seed, naxes=naxes)


@pytest.mark.parametrize("naxes", [1, 2, 3])
def test_every_grid(node, route, naxes):
    """Also ranks that are neighbors on both sides, and their own."""
    every = [(False,) * naxes, (True,) * naxes, (True, False, True)[:naxes]]
    for dims in grids(node.size, naxes):
        ways = itertools.product(dict.fromkeys(every), [False, True])
        for periods, corners in list(ways)[-some(node, 6) :]:
            case = even_case(dims, periods, cells=3, width=2, corners=corners)
            step_by_step(node, node.comm, case, steps=2)


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("width", [((1, 0),), ((0, 2),), ((0, 0),), ((3, 1),)])
def test_one_sided_widths(node, route, width, wraps):
    step_by_step(node, node.comm, even_case((node.size,), wraps, 4, width), steps=4)


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_a_rank_that_owns_nothing(node, route, last):
    """It asks its neighbors for cells, and nobody asks it."""
    cells = [3] * node.size
    cells[-1 if last else 0] = 0
    widths = []
    for rank in range(node.size):
        beside = [cells[(rank + step) % node.size] for step in (-1, 1)]
        widths.append((tuple(min(each, 2) for each in beside),))
    case = Case((node.size,), (True,), (tuple(cells),), tuple(widths))
    if node.size == 1:
        case = Case((1,), (False,), ((0,),), (((2, 1),),))
    step_by_step(node, node.comm, case)


def test_every_cell_of_a_neighbor_more_than_once(node, route):
    step_by_step(node, node.comm, even_case((node.size, 1), True, 2, 2, corners=True))


def test_faces_of_many_cells(node, route):
    """More than fits into any small buffer, and a MiB and more of one neighbor."""
    for dims in ((node.size, 1), (1, node.size)):
        case = even_case(dims, True, 120, ((3, 1), (1, 3)), corners=True)
        step_by_step(node, node.comm, case, KINDS_OF_FOUR)
    case = even_case((node.size, 1), True, 4, ((1, 1), (0, 0)))
    case = Case(case.dims, case.periods, (case.splits[0], (20_000,)), case.widths)
    step_by_step(node, node.comm, case, [Kind("f8", others=(5,), axes=(0, 1))], steps=2)


AXES = [((-2, -1), (3,)), ((1, 0), (2,)), ((0, 2), (2,)), ((3, 1), (2, 3)), ((-1, -3), (1, 2))]


def test_axes(node, route):
    case = even_case((1, node.size), True, 3, ((1, 2), (2, 0)), corners=True)
    for axes, others in AXES:
        step_by_step(node, node.comm, case, [Kind("f4", others=others, axes=axes)])
    line = even_case((node.size,), True, 3)
    step_by_step(node, node.comm, line, [Kind("f4", others=(2, 2), axes=(1,))], axes=1)


def test_fields_with_different_axes_in_one_plan(node, route):
    case = even_case((node.size, 1), True, 3, corners=True)
    others = [(), (2,), (3, 2)]
    kinds = [Kind("f8", others=each, axes=(-2, -1)) for each in others]
    step_by_step(node, node.comm, case, kinds)


# --- communicators


def test_two_plans_on_one_cart_without_a_node(comm):
    """The second one finds the node of the first."""
    case = even_case((comm.size,), True, 4)
    cart = make_cart(comm, case)
    kind = Kind()
    with mpishare.Node(comm, timeout_s=40) as node:
        first, second = ([each] for each in make_fields(node, case, comm.rank, [kind, kind]))
        plans = [mpishare.HaloExchange(cart, arrays(each), 1) for each in (first, second)]
        assert plans[0]._context is plans[1]._context
        for step in range(3):
            for halo, fields in zip(plans, (first, second), strict=True):
                exchange_step(halo, fields, step)
        for halo in plans:
            halo.close()
    cart.Free()


@TWO
def test_ranks_of_the_cart_that_are_not_those_of_the_node(node, route):
    turned = node.comm.Split(0, -node.rank)
    case = random_case(np.random.default_rng([5, node.size]), node.size, 2)
    step_by_step(node, turned, case)
    assert turned.rank == node.size - 1 - node.rank
    turned.Free()


@TWO
@pytest.mark.parametrize("count", [1, 2])
def test_carts_of_some_ranks_of_the_node(node, route, count):
    """Rank 0 takes no part, and hears nothing of it; the others are in one plan or in two."""
    mine = node.comm.Split((node.rank - 1) % count if node.rank else count, node.rank)
    if node.rank:
        case = even_case((mine.size, 1), True, 3 + node.rank % count, corners=True)
        fields = make_fields_alone(node, case, mine.rank)
        with plan(mine, case, arrays(fields), node=node) as halo:
            for step in range(20 * (1 + node.rank % count)):
                exchange_step(halo, fields, step)
    mine.Free()
    node.barrier()


def make_fields_alone(node, case, rank):
    # No windows: those are collective over the node.
    return make_fields(node, case, rank, [Kind("i4")])


@TWO
def test_rows_of_a_cart(node):
    """`Cart.Sub`: each rank in two plans."""
    case = even_case((node.size, 1), True, 3)
    cart = make_cart(node.comm, case)
    for keep in ((True, False), (False, True)):
        row = cart.Sub(keep)
        one = even_case((row.size,), True, 3)
        fields = make_fields_alone(node, one, row.rank)
        halo = mpishare.HaloExchange(row, fields[0].array, 1, node=node)
        for step in range(3):
            exchange_step(halo, fields, step)
        halo.close()
        row.Free()
    cart.Free()
    node.barrier()


@TWO
def test_messages_of_the_user_are_not_taken(node, route):
    """On the same cart, with any tag."""
    case = even_case((node.size,), True, 3)
    fields = make_fields(node, case, node.rank, [Kind()])
    cart = make_cart(node.comm, case)
    halo = mpishare.HaloExchange(cart, arrays(fields), 1, node=node)
    right, left = (node.rank + 1) % node.size, (node.rank - 1) % node.size
    requests = [cart.isend(f"for {right}", right, tag=tag) for tag in (0, 1, 2, 77)]
    for step in range(3):
        exchange_step(halo, fields, step)
    assert {cart.recv(source=left, tag=tag) for tag in (77, 2, 1, 0)} == {f"for {node.rank}"}
    for request in requests:
        request.wait()
    halo.close()
    cart.Free()


# --- what is mine


def of_first(field, slices):
    """A boolean array: where `slices`, one tuple of them, stand."""
    mark = np.zeros(field.numbers.shape, bool)
    mark[slices] = True
    return mark


def test_owned_interior_and_shell(node):
    for seed in range(some(node, 12)):
        one_interior(node, seed)


def one_interior(node, seed):
    rng = np.random.default_rng([seed, node.size, 1])
    case = random_case(rng, node.size)
    kind = Kind("f4", others=(2,), axes=tuple(range(1, case.naxes + 1))) if seed % 2 else Kind()
    [field] = make_fields(node, case, node.rank, [kind])
    with plan(node.comm, case, field.array, axes=kind.axes, node=node) as halo:
        owned = of_first(field, halo.owned)
        right = of_first(field, field.owned)
        inner = of_first(field, halo.interior)
        shells = [of_first(field, each) for each in halo.shell]
    assert np.array_equal(owned, right)
    assert (np.sum([inner, *shells], 0, dtype=int) == owned).all()  # disjoint, and all of it
    assert not (inner & read_by_neighbors(case, field, node.rank)).any()


def read_by_neighbors(case, field, rank):
    """Which of its cells stand in some rank's ghosts, its own too."""
    counts = np.zeros(int(field.numbers.max(initial=0)) + 1, int)
    for each in range(case.size):
        numbers = field.kind.spread(case.cells[each])
        numbers = numbers[(numbers != POISON) & (numbers < len(counts))]
        np.add.at(counts, numbers, 1)
    shown = counts[np.maximum(field.numbers, 0)] > 1
    return shown & of_first(field, field.owned)


def test_slices_with_axes_in_every_form(node):
    """As ints of NumPy, too; counted from the end they fit all fields of the plan."""
    case = even_case((node.size,), True, 3)
    cart = make_cart(node.comm, case)
    one, other = node.xp.zeros((2, 5)), node.xp.zeros((4, 2, 5))
    for axes in (-1, (-1,), [-1], np.int64(-1), np.array([-1])):
        halo = mpishare.HaloExchange(cart, [one, other], 1, axes=axes, node=node)
        assert one[halo.owned].shape == (2, 3)
        assert other[halo.owned].shape == (4, 2, 3)
        assert other[halo.interior].shape == (4, 2, 1)
        assert [other[box].shape for box in halo.shell] == [(4, 2, 1)] * 2
        halo.close()
    cart.Free()


# --- routes


def test_routes_name_every_neighbor(host_node, route):
    node = host_node
    for dims, corners in itertools.product(grids(node.size, 2), [False, True]):
        case = even_case(dims, (True, False), corners=corners)
        halo = step_by_step(node, node.comm, case, steps=1)
        neighbors = set()
        above = [(1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1)]
        row, column = divmod(node.rank, dims[1])
        for down, right in above if corners else above[:4]:
            if 0 <= column + right < dims[1]:
                neighbors.add((row + down) % dims[0] * dims[1] + column + right)
        assert set(halo.routes) == neighbors
        expected = {route or "host"}
        assert {kind for rank, kind in halo.routes.items() if rank != node.rank} <= expected
        assert halo.routes.get(node.rank, "host") in {"host", *expected}


def test_require_what_there_is(host_node):
    case = even_case((host_node.size,), True)
    for require in ("host", ("host",), ["host", "mpi"], ("fused", "host")):
        step_by_step(host_node, host_node.comm, case, require=require)


@TWO
def test_require_what_there_is_not(host_node):
    """On every rank, with the routes that there are."""
    case = even_case((host_node.size,), True)
    for require in (("fused",), ("copy", "fused"), ("mpi",)):
        with pytest.raises(UnsupportedError, match="host"):
            step_by_step(host_node, host_node.comm, case, require=require)
    for require in (("nvlink",), (), 3):
        with pytest.raises((ValueError, TypeError), match="require"):
            step_by_step(host_node, host_node.comm, case, require=require)
    step_by_step(host_node, host_node.comm, case, steps=1)


@TWO
def test_require_against_a_forced_route(host_node, monkeypatch):
    monkeypatch.setenv("MPISHARE_ROUTE", "mpi")
    case = even_case((host_node.size,), True)
    with pytest.raises(UnsupportedError, match="mpi"):
        step_by_step(host_node, host_node.comm, case, require=("host",))
    step_by_step(host_node, host_node.comm, case, require=("mpi", "host"))


@pytest.mark.ranks(min=3)
def test_require_where_one_rank_alone_has_no_such_neighbor(host_node):
    """Refused on every rank, also on one whose own neighbors would do."""
    node = host_node
    case = even_case((node.size,), False, 3)
    widths = [((0, 0),)] * node.size
    widths[0] = ((0, 1),)
    case = Case(case.dims, case.periods, case.splits, tuple(widths))
    with pytest.raises(UnsupportedError):
        step_by_step(node, node.comm, case, require=("fused",))


def test_host_plans_warn_of_nothing(host_node, caplog):
    with caplog.at_level(logging.WARNING, "mpishare"):
        step_by_step(host_node, host_node.comm, even_case((host_node.size,), True))
    assert caplog.records == []


def test_routes_that_are_none_or_not_here(host_node, monkeypatch):
    names = dict.fromkeys(("nvlink", "HOST", "fused,copy"), ValueError)
    names |= dict.fromkeys(("fused", "copy", "pinned"), UnsupportedError)
    for name, error in names.items():
        monkeypatch.setenv("MPISHARE_ROUTE", name)
        with pytest.raises(error, match="MPISHARE_ROUTE"):
            step_by_step(host_node, host_node.comm, even_case((host_node.size,), True))


@TWO
def test_a_route_that_is_forced_on_one_rank_alone(host_node, monkeypatch):
    if host_node.rank == 0:
        monkeypatch.setenv("MPISHARE_ROUTE", "mpi")
    with pytest.raises(MismatchError, match="MPISHARE_ROUTE"):
        step_by_step(host_node, host_node.comm, even_case((host_node.size,), True))
    monkeypatch.undo()
    step_by_step(host_node, host_node.comm, even_case((host_node.size,), True))


def test_a_slow_route_is_said_once(host_node, caplog, monkeypatch):
    """One warning of the plan, on whichever rank."""
    monkeypatch.setenv("MPISHARE_ROUTE", "mpi")
    with caplog.at_level(logging.WARNING, "mpishare"):
        step_by_step(host_node, host_node.comm, even_case((host_node.size,), True))
    told = [record.getMessage() for record in caplog.records]
    every = [text for texts in host_node.comm.allgather(told) for text in texts]
    assert len(every) == 1, every
    assert "mpi" in every[0]
    assert "MPISHARE_ROUTE" in every[0]


def test_a_plan_that_was_closed_holds_no_memory(host_node):
    """Whoever keeps the object does not keep its staging, if that is more than a node keeps."""
    before = shared_bytes()
    cart = host_node.comm.Create_cart([host_node.size], [True])
    field = np.zeros((1 << 17, 4))  # packed: it is in no window, and its faces are columns
    halo = mpishare.HaloExchange(cart, field, 1, axes=(1,), node=host_node)
    halo.exchange()
    assert host_node.size == 1 or shared_bytes() > before
    halo.close()
    assert shared_bytes() == before
    cart.Free()


@pytest.mark.ranks(min=2)
def test_the_next_plan_takes_the_staging_of_a_closed_one(host_node):
    """Zeroed: its counts of calls begin anew."""
    cart = host_node.comm.Create_cart([host_node.size], [True])
    low = (cart.rank - 1) % cart.size
    held = []
    for turn in range(3):
        field = np.full((6, 1 << 12), turn * cart.size + cart.rank, float)  # no part of the pool
        halo = mpishare.HaloExchange(cart, field, 1, axes=(0,), node=host_node)
        for step in range(3):
            field[1:-1] += 1
            halo.exchange()
            assert (field[0] == turn * cart.size + low + step + 1).all()
        held.append(shared_bytes())
        halo.close()
        held.append(shared_bytes())
        host_node.barrier()
    assert len({*held}) == 1
    cart.Free()

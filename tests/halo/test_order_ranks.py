"""Order: what a start sees, when a ghost may change, and which calls do not fit together.

Ranks sleep at random places; every value depends on the step. Boundary cells are overwritten right
after `wait`, which a neighbor that still reads them would see.
"""

import time
from contextlib import ExitStack
from unittest import mock

import numpy as np
import pytest

import mpishare
from mpishare import EpochError
from mpishare.halo.host import compiled_route, parts
from tests.helpers.compiled import needs_compiled
from tests.helpers.halos import (
    Field,
    Kind,
    arrays,
    check,
    even_case,
    exchange_step,
    make_fields,
    pause,
    plan,
    put,
    read_in_place,
    star_of_rank_0,
)
from tests.helpers.latch import check_order

TWO = pytest.mark.ranks(min=2)


@pytest.fixture(params=["private", "window", "process", "mpi"])
def in_window(request, monkeypatch):
    """Whether the fields live where the neighbors can read and write.

    Others are packed, read from the sender's process, or sent by messages.
    """
    if request.param == "mpi":
        monkeypatch.setenv("MPISHARE_ROUTE", "mpi")
    with read_in_place(small=request.param in ("window", "process")):
        yield request.param == "window"


def case_of(node, periods=True, width=1):
    return even_case((node.size, 1), periods, 4, width, corners=True)


def own_rng(node, seed=0):
    """Of this rank alone: who sleeps when."""
    return np.random.default_rng([seed, node.rank, 13])


# --- steps with random delays


@pytest.mark.parametrize("way", ["exchange", "start and wait"])
def test_owned_cells_are_overwritten_right_after_wait(node, in_window, way):
    case = case_of(node)
    fields = make_fields(node, case, node.rank, [Kind("i8"), Kind("i4")], [in_window] * 2)
    mine = own_rng(node)
    with plan(node.comm, case, arrays(fields), node=node) as halo:
        for step in range(1, 50):
            put(fields, 10 * step)
            pause(mine, 0.002, 0.05)
            if way == "exchange":
                halo.exchange()
            else:
                halo.start()
                pause(mine, 0.002, 0.05)
                halo.wait()
            kept = [on_the_side(field) for field in fields]
            for field in fields:
                field.spoil()
            pause(mine, 0.002, 0.05)
            for field, owned in zip(fields, kept, strict=True):
                field.array[field.owned] = owned
            check(fields, 10 * step)


def on_the_side(field):
    return field.array[field.owned].copy()


def test_ghosts_stay_until_the_next_start(node, in_window):
    """A neighbor that runs ahead writes nothing of the next step before I ask for it."""
    case = case_of(node)
    fields = make_fields(node, case, node.rank, [Kind("i8")], [in_window])
    mine = own_rng(node, 1)
    with plan(node.comm, case, arrays(fields), node=node) as halo:
        for step in range(1, 50):
            put(fields, step)
            halo.exchange()
            pause(mine, 0.003, 0.2)
            check(fields, step)
            put(fields, step + 1000)
            pause(mine, 0.003, 0.2)
            # What I wrote to my ghosts, boundary values say, stands until then too.
            fields[0].poison()
            pause(mine, 0.003, 0.2)
            put(fields, step)
            check(fields, step, exchanged=False)


def test_a_rank_that_may_run_ahead(node, in_window):
    """Data flows one way only, so that no answer holds the first rank back."""
    for width in (((1, 0),), ((0, 2),)):
        for wraps in (False, True):
            run_ahead(node, in_window, width, wraps)


def run_ahead(node, in_window, width, wraps):
    case = even_case((node.size,), wraps, 3, width)
    fields = make_fields(node, case, node.rank, [Kind("i8")], [in_window])
    slow = node.size - 1 if width == ((1, 0),) else 0
    with plan(node.comm, case, arrays(fields), node=node) as halo:
        for step in range(1, 60):
            put(fields, step)
            halo.exchange()
            if node.rank == slow:
                time.sleep(0.0005)
            check(fields, step)
            fields[0].spoil()


def test_alternating_fields_with_delays(node, in_window):
    """`u, v = v, u`: the neighbor may still read the old one while the new one is written."""
    case = case_of(node)
    kinds = [Kind("i8"), Kind("i8")]
    now, then = ([each] for each in make_fields(node, case, node.rank, kinds, [in_window] * 2))
    mine = own_rng(node, 2)
    with plan(node.comm, case, now[0].array, node=node) as halo:
        for step in range(1, 60):
            put(now, step)
            pause(mine, 0.002, 0.1)
            halo.exchange(now[0].array)
            then[0].spoil()
            pause(mine, 0.002, 0.1)
            check(now, step)
            now, then = then, now


def test_interior_is_written_between_start_and_wait(node, in_window):
    """And all owned cells are read."""
    case = case_of(node, width=((1, 2), (1, 1)))
    case = type(case)(case.dims, case.periods, ((8,) * node.size, (9,)), case.widths, True)
    fields = make_fields(node, case, node.rank, [Kind("i8")], [in_window])
    [field] = fields
    mine = own_rng(node, 3)
    with plan(node.comm, case, field.array, node=node) as halo:
        for step in range(1, 60):
            put(fields, step)
            halo.start()
            kept = field.array[halo.interior].copy()
            field.array[halo.interior] = -step
            pause(mine, 0.002, 0.1)
            assert (field.array[halo.interior] == -step).all()
            halo.wait()
            field.array[halo.interior] = kept
            check(fields, step)


# --- several plans


@pytest.mark.parametrize("order", ["nested", "crossed", "in between"])
def test_two_plans_interleaved(node, in_window, order):
    one, other = case_of(node), even_case((1, node.size), True, 3, 2)
    first, second = (
        make_fields(node, case, node.rank, [Kind("i8")], [in_window]) for case in (one, other)
    )
    mine = own_rng(node, 4)
    with (
        plan(node.comm, one, arrays(first), node=node) as a,
        plan(node.comm, other, arrays(second), node=node) as b,
    ):
        calls = {
            "nested": [a.start, b.start, b.wait, a.wait],
            "crossed": [a.start, b.start, a.wait, b.wait],
            "in between": [a.start, b.exchange, a.wait],
        }[order]
        for step in range(1, 50):
            put(first, step)
            put(second, step)
            for call in calls:
                call()
                pause(mine, 0.001, 0.1)
            check(first, step)
            check(second, step)


def test_a_plan_between_windows_and_barriers(node, route):
    """Fences and windows of the node beside the exchanges of a plan."""
    case = case_of(node)
    fields = make_fields(node, case, node.rank, [Kind("i8")])
    window = node.allocate_each(4, "i8", fill=0)
    with plan(node.comm, case, arrays(fields), node=node) as halo:
        for step in range(1, 30):
            put(fields, step)
            halo.start()
            window.array[...] = step
            window.fence()
            assert int(window.segment((node.rank + 1) % node.size)[0]) == step
            window.fence()
            halo.wait()
            check(fields, step)
            if step % 7 == 0:
                node.barrier()
                node.allocate(3).close()


@pytest.mark.ranks(max=2)
def test_very_many_exchanges(node):
    """Counters go on, and nothing grows."""
    case = even_case((node.size,), True, 2)
    fields = make_fields(node, case, node.rank, [Kind("i4")], [True])
    [field] = fields
    count = 10_000 if node.backend == "cuda" else 100_000 if node.size == 1 else 20_000
    with plan(node.comm, case, field.array, node=node) as halo:
        for step in range(count):
            if step % 1000 == 0:
                put(fields, step)
            halo.exchange()
            if step % 1000 == 999:
                check(fields, step - 999)
        exchange_step(halo, fields, 1)


# --- held producers


def held_ghost(node, halo, field, **more):
    """Rank 0 is held before it writes its cells; its right neighbor's ghost shows them."""

    check_order(node, field, 0, signal=halo.exchange, wait=halo.exchange, **more)


@TWO
def test_exchange_waits_for_a_held_neighbor(node):
    """Every rank here is rank 0's neighbor: all wait."""
    field, halo = star_of_rank_0(node)
    for value in (7, 8):
        held_ghost(node, halo, field, value=value)
    halo.close()


@TWO
def test_exchange_waits_for_a_late_neighbor(node, route):
    field, halo = star_of_rank_0(node)
    for step in range(1, 6):
        if node.rank == 0:
            time.sleep(0.02)
            field[...] = step
        halo.exchange()
        assert (field == step).all()
    halo.close()


@TWO
def test_control_without_the_wait_a_held_neighbor_is_not_waited_for(python_node, monkeypatch):
    """The same check, with the wait taken out: it fails on every rank."""
    node = python_node
    field, halo = star_of_rank_0(node)
    staging = halo._forward._host._staging
    monkeypatch.setattr(staging, "wait_until", lambda *arguments: None)
    with pytest.raises(AssertionError, match=r"passed while|other ranks read"):
        held_ghost(node, halo, field)
    monkeypatch.undo()
    halo.close()


@TWO
@pytest.mark.parametrize("is_in_window", [True, False])
def test_control_without_the_wait_for_readers_a_neighbor_reads_what_comes_next(
    compiled_node, monkeypatch, is_in_window
):
    """A field that is read in place: its owner must wait until all have read."""
    node = compiled_node
    case = even_case((node.size,), True, 3)
    fields = make_fields(node, case, node.rank, [Kind("i8")], [is_in_window])
    wrong = 0
    if node.rank == 0:  # it alone does not wait for its readers
        real = compiled_route.lay_out
        without = lambda *a, **b: real(*a, **b)._replace(readers=[])  # noqa: E731
        monkeypatch.setattr(compiled_route, "lay_out", without)
    with read_in_place(), plan(node.comm, case, arrays(fields), node=node) as halo:
        for step in range(1, 40):
            put(fields, step)
            halo.start()
            if node.rank == 1:
                time.sleep(0.002)
            halo.wait()
            fields[0].spoil()
            put(fields, step)
            if node.rank == 0:
                fields[0].spoil()
            wrong += bool(fields[0].flaws(step)) if node.rank else 0
    assert sum(node.comm.allgather(wrong)) > 0


# --- calls that do not fit together


def test_start_twice(node, route):
    case = case_of(node)
    fields = make_fields(node, case, node.rank, [Kind()])
    with plan(node.comm, case, arrays(fields), node=node) as halo:
        for step in range(3):
            put(fields, step)
            halo.start()
            for call in (halo.start, halo.exchange, halo.accumulate):
                with pytest.raises(EpochError):
                    call()
            halo.wait()
            check(fields, step)


def test_wait_without_start(node, route):
    case = case_of(node)
    fields = make_fields(node, case, node.rank, [Kind()])
    with plan(node.comm, case, arrays(fields), node=node) as halo:
        for step in range(3):
            with pytest.raises(EpochError):
                halo.wait()
            put(fields, step)
            halo.exchange()
            with pytest.raises(EpochError):
                halo.wait()
            check(fields, step)


def test_close_with_an_exchange_open(node, route):
    """It is waited for: nothing of it is left for the next plan."""
    case = case_of(node)
    fields = make_fields(node, case, node.rank, [Kind()])
    for step in range(3):
        with plan(node.comm, case, arrays(fields), node=node) as halo:
            put(fields, step)
            halo.start()
            with pytest.warns(ResourceWarning, match=rf"^{halo.name} was closed after start\(\)"):
                halo.close()
    with plan(node.comm, case, arrays(fields), node=node) as halo:
        exchange_step(halo, fields, 9)


def test_close_after_an_exception_does_not_warn(node):
    case = case_of(node)
    fields = make_fields(node, case, node.rank, [Kind()])
    with plan(node.comm, case, arrays(fields), node=node) as halo:
        halo.start()
        try:
            raise KeyError
        except KeyError:
            halo.close()


LAYOUTS = {  # and what is said of each
    "shape": (
        lambda xp, array: xp.zeros((array.shape[0] + 1, array.shape[1]), array.dtype),
        r"\(7, 6\).*\(6, 6\)",
    ),
    "dtype": (lambda xp, array: xp.zeros(array.shape, "i8"), "int64.*float64"),
    "strides": (lambda xp, array: xp.asfortranarray(array), r"strides.*\(8, 48\)"),
    "stride": (
        lambda xp, array: xp.zeros((array.shape[0], 2 * array.shape[1]))[:, ::2],
        r"strides.*\(96, 16\)",
    ),
    "more axes": (lambda xp, array: array[..., None], r"\(6, 6, 1\)"),
    "fewer axes": (lambda xp, array: array.ravel(), r"\(36,\)"),
    "no array": (lambda xp, array: array.tolist(), "list"),
}


def test_another_layout(node, route):
    """A ValueError that says what differs, before anything was sent: the next call is right."""
    case = case_of(node)
    fields = make_fields(node, case, node.rank, [Kind()])
    with plan(node.comm, case, arrays(fields), node=node) as halo:
        for at, (name, (make, words)) in enumerate(LAYOUTS.items()):
            other = make(node.xp, fields[0].array)
            for call in (halo.exchange, halo.start, halo.accumulate):
                with pytest.raises((ValueError, TypeError), match=words) as caught:
                    call(other)
                assert isinstance(caught.value, ValueError) or name == "no array"
            exchange_step(halo, fields, at)


def test_another_count_of_fields(node, route):
    case = case_of(node)
    fields = make_fields(node, case, node.rank, [Kind(), Kind("i4")])
    one, two = arrays(fields)
    with plan(node.comm, case, [one, two], node=node) as halo:
        for wrong in ([one], [one, two, two], [two, one], [[one, two]]):
            with pytest.raises((ValueError, TypeError)):
                halo.exchange(*wrong)
        exchange_step(halo, fields, 3, one, two)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda array: array[:-1],
        lambda array: array.astype("f4"),
        np.asfortranarray,
        lambda array: np.broadcast_to(array[:1], array.shape),
    ],
    ids=["shape", "dtype", "strides", "read-only"],
)
def test_an_unfit_array_of_several_is_named_by_its_number(host_node, spoil):
    case = even_case((host_node.size, 1), True, 3, ((1, 2), (2, 1)))
    given = arrays(make_fields(host_node, case, host_node.rank, [Kind("f8")] * 3))
    with plan(host_node.comm, case, given, node=host_node) as halo:
        with pytest.raises(ValueError, match=r": field 1 (has another layout|is read-only)"):
            halo.exchange(given[0], spoil(given[1]), given[2])
        with pytest.raises(TypeError, match=r": field 2 is not an array"):
            halo.exchange(*given[:2], [1.0])


def test_strides_of_an_axis_of_one_do_not_matter(node, route):
    """NumPy gives them any value."""
    case = even_case((node.size, 1), True, 3, ((1, 1), (0, 0)))
    case = type(case)(case.dims, case.periods, (case.splits[0], (1,)), case.widths)
    fields = make_fields(node, case, node.rank, [Kind()])
    other = Field.of(node.xp, case, node.rank, Kind("f8", "F"))
    with plan(node.comm, case, arrays(fields), node=node) as halo:
        exchange_step(halo, [other], 5, other.array)


def test_a_node_ends_what_was_started_before_it_closes_the_window(host_node):
    """The field is in a window that is newer than the plan."""
    comm = host_node.comm
    node = mpishare.Node(comm, backend="host", timeout_s=20)
    cart = comm.Create_cart([comm.size], periods=[True])
    halo = mpishare.HaloExchange(cart, np.zeros((6, 4096)), 1, axes=0, node=node)
    halo.start(node.allocate_each((6, 4096), fill=0).array)
    with pytest.warns(ResourceWarning, match=rf"^{halo.name} was closed after start\(\)"):
        node.close()
    assert halo.is_closed
    cart.Free()


@TWO
@pytest.mark.parametrize("code", ["compiled", "python"])
def test_memory_that_is_short_on_one_rank_is_an_error_on_all(request, monkeypatch, code):
    """Whatever fails last in making a plan."""
    host_node = request.getfixturevalue(f"{code}_node")
    comm = host_node.comm
    cart = comm.Create_cart([comm.size], periods=[True])

    def fail(*_, **__):
        raise MemoryError("none left")

    route = {"compiled": "compiled_route.CompiledRoute", "python": "reference.ReferenceRoute"}[code]
    messages = "plans.mpi_route.MpiMessages.__init__"
    for way, place in (("mpi", messages), ("host", f"halo.host.{route}.lay_out")):
        with monkeypatch.context() as patch:
            patch.setenv("MPISHARE_ROUTE", way)
            if comm.rank == 1:
                patch.setattr(f"mpishare.{place}", fail)
            with pytest.raises(MemoryError if comm.rank == 1 else mpishare.PeerError):
                mpishare.HaloExchange(cart, np.zeros(6), 1, node=host_node)
    mpishare.HaloExchange(cart, np.zeros(6), 1, node=host_node).close()
    cart.Free()


@needs_compiled
@pytest.mark.ranks(min=3)
@pytest.mark.parametrize("call", ["exchange", "wait", "fence"])
def test_cells_that_are_overwritten_after_an_error_are_not_taken(monkeypatch, call):
    """Rank 0 leaves, rank 1 learns of it and uses its field anew, rank 2 reads it after that."""
    monkeypatch.setenv("MPISHARE_HOST_CODE", "compiled")
    with ExitStack() as stack:
        node = stack.enter_context(mpishare.Node(backend="host", timeout_s=20))
        stack.enter_context(read_in_place())
        # What is in no window is packed: of what rank 2 has it waits for no reader.
        stack.enter_context(mock.patch.object(parts, "_MIN_READ_NBYTES", 1 << 30))
        cart = node.comm.Create_cart((node.size,), (False,))
        win = node.allocate_each((4, 64), "f8", fill=0)
        field = win.array if node.rank == 1 else np.zeros((4, 64))
        halo = mpishare.HaloExchange(cart, field, 1, axes=(0,), node=node)
        halo.exchange(field)
        field[1:3] = node.rank
        node.comm.Barrier()
        if node.rank == 0:
            node._context.agreement.leave("a test", ValueError("no more"))
        elif node.rank == 1:
            if call != "exchange":
                halo.start(field)
            node.comm.recv(source=0)
            with pytest.raises(mpishare.PeerError, match="no more"):
                {"exchange": halo.exchange, "wait": halo.wait, "fence": win.fence}[call]()
            field[...] = -1
        if node.rank in (0, 1):
            node.comm.send(None, node.rank + 1)
        else:
            if node.rank == 2:
                node.comm.recv(source=1)
            else:
                halo.start(field)  # all that rank 2 waits for
            with pytest.raises(mpishare.PeerError, match="no more"):
                halo.exchange(field) if node.rank == 2 else node.barrier()
        cart.Free()

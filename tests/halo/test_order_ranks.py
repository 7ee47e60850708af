"""Order: what a start sees, when a ghost may change, and which calls do not fit together.

Ranks sleep at random places; every value depends on the step. Boundary cells are overwritten right
after `wait`, which a neighbor that still reads them would see.
"""

import time
from functools import partial

import numpy as np
import pytest

import mpishare
from mpishare import EpochError
from tests.helpers.halos import (
    Kind,
    arrays,
    check,
    even_case,
    exchange_by,
    exchange_step,
    exchanging,
    pause,
    put,
    read_in_place,
    star_of_rank_0,
)
from tests.helpers.latch import check_order
from tests.helpers.rings import ring

TWO = pytest.mark.ranks(min=2)
INTS = (Kind("i8"),)


@pytest.fixture(params=["private", "window", "process", "mpi"])
def in_window(request, monkeypatch):
    """Whether the fields live where the neighbors can read and write.

    Others are packed, read from the sender's process, or sent by messages.
    """
    if request.param == "mpi":
        monkeypatch.setenv("MPISHARE_ROUTE", "mpi")
    with read_in_place(small=request.param in ("window", "process")):
        yield request.param == "window"


@pytest.fixture
def rest(node):
    """Sleeps at random on this rank alone."""
    rng = np.random.default_rng([node.rank, 13])
    return lambda most_s=0.002, share=0.05: pause(rng, most_s, share)


def case_of(node, width=1):
    return even_case((node.size, 1), True, 4, width, corners=True)


@pytest.mark.parametrize("way", ["exchange", "start and wait"])
def test_owned_cells_are_overwritten_right_after_wait(node, in_window, rest, way):
    kinds = [Kind("i8"), Kind("i4")]
    with exchanging(node, case_of(node), kinds, in_window) as (halo, fields):
        for step in range(1, 50):
            put(fields, 10 * step)
            rest()
            exchange_by(halo, *arrays(fields), halves=way != "exchange", between=rest)
            kept = [field.array[field.owned].copy() for field in fields]
            for field in fields:
                field.spoil()
            rest()
            for field, owned in zip(fields, kept, strict=True):
                field.array[field.owned] = owned
            check(fields, 10 * step)


def test_ghosts_stay_until_the_next_start(node, in_window, rest):
    """A neighbor that runs ahead writes nothing of the next step before I ask for it."""
    with exchanging(node, case_of(node), INTS, in_window) as (halo, fields):
        for step in range(1, 50):
            put(fields, step)
            halo.exchange(*arrays(fields))
            rest(0.003, 0.2)
            check(fields, step)
            put(fields, step + 1000)
            rest(0.003, 0.2)
            # What I wrote to my ghosts, boundary values say, stands until then too.
            fields[0].poison()
            rest(0.003, 0.2)
            put(fields, step)
            check(fields, step, exchanged=False)


def test_a_rank_that_may_run_ahead(node, in_window):
    """Data flows one way only, so that no answer holds the first rank back."""
    for width, slow in ((((1, 0),), node.size - 1), (((0, 2),), 0)):
        for wraps in (False, True):
            case = even_case((node.size,), wraps, 3, width)
            with exchanging(node, case, INTS, in_window) as (halo, fields):
                for step in range(1, 60):
                    put(fields, step)
                    halo.exchange(*arrays(fields))
                    if node.rank == slow:
                        time.sleep(0.0005)
                    check(fields, step)
                    fields[0].spoil()


def test_a_private_field_and_one_in_a_window_by_turns(host_node):
    """Where a field lies is told anew in each exchange, also to a rank that is one behind."""
    node, width = host_node, 4096
    window = node.allocate_each(3 * width, "i8")
    fields = window.array, np.empty(3 * width, "i8")
    grid = {"dims": (node.size,), "periods": False, "node": node}
    with mpishare.HaloExchange(node.comm, fields[0], ((width, 0),), **grid) as halo:
        for step in range(1, 60):
            field = fields[step % 2]
            field[halo.owned] = 100 * step + node.rank
            if node.rank == node.size - 1:
                time.sleep(0.0005)
            halo.exchange(field)
            assert node.rank == 0 or (field[:width] == 100 * step + node.rank - 1).all()


@pytest.mark.parametrize("order", ["nested", "crossed", "in between"])
def test_two_plans_interleaved(node, in_window, rest, order):
    other = even_case((1, node.size), True, 3, 2)
    with (
        exchanging(node, case_of(node), INTS, in_window) as (a, first),
        exchanging(node, other, INTS, in_window) as (b, second),
    ):
        starts = [partial(a.start, *arrays(first)), partial(b.start, *arrays(second))]
        calls = {
            "nested": [*starts, b.wait, a.wait],
            "crossed": [*starts, a.wait, b.wait],
            "in between": [starts[0], partial(b.exchange, *arrays(second)), a.wait],
        }[order]
        for step in range(1, 50):
            put(first, step)
            put(second, step)
            for call in calls:
                call()
                rest(0.001, 0.1)
            check(first, step)
            check(second, step)


def check_held(node, halo, field, value=7):
    """Rank 0 is held before it writes its cells; the ghosts of all others show them."""
    call = partial(halo.exchange, field)
    check_order(node, field, 0, signal=call, wait=call, value=value)


@TWO
def test_exchange_waits_for_a_held_neighbor(node, stream_route):
    """Every rank here is rank 0's neighbor: all wait."""
    field, halo = star_of_rank_0(node)
    halo.exchange(field)
    node.synchronize()
    for value in (7, 8, 9):
        check_held(node, halo, field, value)
    halo.close()


def test_calls_out_of_turn(node, route):
    with exchanging(node, case_of(node)) as (halo, fields):
        for step in range(3):
            with pytest.raises(EpochError):
                halo.wait()
            put(fields, step)
            halo.start(*arrays(fields))
            for call in (halo.start, halo.exchange, halo.accumulate):
                with pytest.raises(EpochError):
                    call(*arrays(fields))
            halo.wait()
            check(fields, step)


def test_close_with_an_exchange_open(node, route):
    """It is waited for: nothing of it is left for the next plan."""
    for step in range(3):
        with exchanging(node, case_of(node)) as (halo, fields):
            put(fields, step)
            halo.start(*arrays(fields))
            with pytest.warns(ResourceWarning, match=rf"^{halo.name} was closed after start\(\)"):
                halo.close()
    with exchanging(node, case_of(node)) as (halo, fields):
        exchange_step(halo, fields, 9)


def test_close_after_an_exception_does_not_warn(node):
    with exchanging(node, case_of(node)) as (halo, fields):
        halo.start(*arrays(fields))
        try:
            raise KeyError
        except KeyError:
            halo.close()


LAYOUTS = {  # and what is said of each
    "shape": (lambda xp, u: xp.zeros((7, 6)), r"\(7, 6\).*\(6, 6\)"),
    "dtype": (lambda xp, u: xp.zeros(u.shape, "i8"), "int64.*float64"),
    "strides": (lambda xp, u: xp.asfortranarray(u), r"strides.*\(8, 48\)"),
    "stride": (lambda xp, u: xp.zeros((6, 12))[:, ::2], r"strides.*\(96, 16\)"),
    "more axes": (lambda xp, u: u[..., None], r"\(6, 6, 1\)"),
    "fewer axes": (lambda xp, u: u.ravel(), r"\(36,\)"),
    "no array": (lambda xp, u: u.tolist(), "list"),
}


def test_another_layout(node, route):
    """A ValueError that says what differs, before anything was sent: the next call is right."""
    with exchanging(node, case_of(node)) as (halo, fields):
        for at, (name, (make, words)) in enumerate(LAYOUTS.items()):
            for call in (halo.exchange, halo.start, halo.accumulate):
                with pytest.raises(TypeError if name == "no array" else ValueError, match=words):
                    call(make(node.xp, fields[0].array))
            exchange_step(halo, fields, at)


def test_an_unfit_array_of_several_is_named_by_its_number(host_node):
    with exchanging(host_node, case_of(host_node), [Kind()] * 3) as (halo, fields):
        one, two, three = arrays(fields)
        read_only = np.broadcast_to(two[:1], two.shape)
        for unfit in (two[:-1], two.astype("f4"), np.asfortranarray(two), read_only):
            with pytest.raises(ValueError, match=r": field 1 (has another layout|is read-only)"):
                halo.exchange(one, unfit, three)
        with pytest.raises(TypeError, match=r": field 2 is not an array"):
            halo.exchange(one, two, [1.0])


def test_a_node_ends_what_was_started_before_it_closes_the_window(host_node):
    """The field is in a window that is newer than the plan."""
    node = mpishare.Node(host_node.comm, backend="host", timeout_s=20)
    halo = ring(node, np.zeros((6, 4096)), axes=0)
    halo.start(node.allocate_each((6, 4096), fill=0).array)
    with pytest.warns(ResourceWarning, match=rf"^{halo.name} was closed after start\(\)"):
        node.close()
    assert halo.is_closed

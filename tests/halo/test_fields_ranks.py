"""Which arrays a plan takes: of any dtype and layout, many at once, others at every call."""

import gc
import weakref

import numpy as np
import pytest

import mpishare
from mpishare import ClosedError
from tests.helpers.halos import (
    DTYPES,
    FORMS,
    HOST_DTYPES,
    HOST_FORMS,
    Field,
    Kind,
    arrays,
    check,
    even_case,
    exchange_step,
    make_cart,
    make_fields,
    plan,
    put,
    random_case,
    read_in_place,
    some,
)
from tests.helpers.held import held

TWO = pytest.mark.ranks(min=2)
PLACES = ["private", "window", "mixed", "alternating"]


@pytest.fixture(autouse=True)
def small_fields():
    """What is small is read in place too, where it lives in a window."""
    with read_in_place():
        yield


@pytest.fixture(params=["private", "window", "mpi"])
def in_window(request, monkeypatch):
    """Whether the fields live where the neighbors can write. Also by messages."""
    if request.param == "mpi":
        monkeypatch.setenv("MPISHARE_ROUTE", "mpi")
    return request.param == "window"


def case_of(node, corners=True):
    """Two axes, neighbors on both sides and itself."""
    return even_case((node.size, 1), True, 3, ((1, 2), (2, 1)), corners=corners)


def go(node, kinds, in_window, case=None):
    """Make the plan; exchange and check the fields that it was made with, then new ones."""
    case = case or case_of(node)
    fields = make_fields(node, case, node.rank, kinds, [in_window] * len(kinds))
    with plan(node.comm, case, arrays(fields), axes=kinds[0].axes, node=node) as halo:
        exchange_step(halo, fields, 1)
        exchange_step(halo, fields, 100)
        for step in (200, 300):
            fields = make_fields(node, case, node.rank, kinds)
            put(fields, step)
            halo.start(*arrays(fields))
            halo.wait()
            check(fields, step)


# --- dtypes and layouts


def test_every_itemsize(host_node, in_window):
    for itemsize in range(1, 17):
        forms = ("C", HOST_FORMS[itemsize % len(HOST_FORMS)])
        go(host_node, [Kind(f"V{itemsize}", form) for form in forms], in_window)


def test_layouts(node, in_window):
    for form in FORMS:
        for dtype in ("i1", "f4", "c16")[: some(node, 3)]:
            go(node, [Kind(dtype, form)], in_window)


def test_one_plan_of_everything(node, in_window):
    kinds = [Kind(dtype, FORMS[at % len(FORMS)]) for at, dtype in enumerate(DTYPES)]
    go(node, kinds, in_window)


def test_one_plan_of_everything_on_the_host(host_node, in_window):
    kinds = [
        Kind(dtype, HOST_FORMS[at % len(HOST_FORMS)], (2,) * (at % 3), (-2, -1))
        for at, dtype in enumerate(DTYPES + HOST_DTYPES)
    ]
    go(host_node, kinds, in_window)


def test_how_many_fields(node, route):
    for count in (1, 2, 30):
        go(node, [Kind("f4")] * count, False)


def test_an_empty_field(node, route):
    """No cells along an axis that the cart does not cut: nothing travels."""
    case = case_of(node)
    kinds = [Kind("f8", others=(0,), axes=(0, 1)), Kind("f8", others=(2,), axes=(0, 1))]
    go(node, kinds, False, case)


def test_different_layouts_on_different_ranks(node, route):
    """Strides are each rank's own affair."""
    case = case_of(node)
    kinds = [Kind("f8", FORMS[(node.rank + at) % len(FORMS)]) for at in range(3)]
    in_window = [(node.rank + at) % 2 == 1 for at in range(3)]
    fields = [
        some_field(node, case, kind, each) for kind, each in zip(kinds, in_window, strict=True)
    ]
    with plan(node.comm, case, arrays(fields), node=node) as halo:
        for step in range(3):
            exchange_step(halo, fields, 100 * step)


def some_field(node, case, kind, is_in_window):
    # Collective, whichever ranks use the window.
    nbytes = Field.nbytes(kind.spread(case.cells[node.rank]).shape, kind)
    window = node.allocate_each(nbytes, "u1")
    return Field.of(node.xp, case, node.rank, kind, window.array if is_in_window else None)


# --- other arrays at every call


def test_places_that_change_from_call_to_call(node, route):
    """In a window or not: each rank passes what it likes, without telling the others."""
    for places in PLACES:
        changing(node, places)


def changing(node, places):
    case = case_of(node)
    kinds = [Kind("f8"), Kind("i2", "F")]
    flags = {
        "private": lambda rank, at: False,
        "window": lambda rank, at: True,
        "mixed": lambda rank, at: at % 2 == 0,
        "alternating": lambda rank, at: rank % 2 == at % 2,
    }[places]
    chosen = [flags(node.rank, at) for at in range(4)]
    pool = [some_field(node, case, kinds[at // 2], chosen[at]) for at in range(4)]
    mine = np.random.default_rng([node.rank, 11])
    with plan(node.comm, case, [pool[0].array, pool[2].array], node=node) as halo:
        for step in range(1, 25):
            fields = [pool[mine.integers(2)], pool[2 + mine.integers(2)]]
            exchange_step(halo, fields, 10 * step, *arrays(fields))


def test_arrays_are_not_held(host_node):
    case, kind = case_of(host_node), Kind("f8")
    first = make_fields(host_node, case, host_node.rank, [kind])
    with plan(host_node.comm, case, first[0].array, node=host_node) as halo:
        for call in (halo.exchange, halo.accumulate):
            (field,) = make_fields(host_node, case, host_node.rank, [kind])
            call(field.array)
            gone = weakref.ref(field.array)
            del field
            assert gone() is None


def test_an_array_in_the_window_of_another_rank(node, route):
    """My field may live in memory that another rank owns."""
    case = case_of(node)
    kind = Kind("f8")
    nbytes = Field.nbytes(kind.spread(case.cells[node.rank]).shape, kind)
    window = node.allocate_each(nbytes, "u1")
    memory = window.segment((node.rank + 1) % node.size)
    fields = [Field.of(node.xp, case, node.rank, kind, memory)]
    node.synchronize()
    node.barrier()
    with plan(node.comm, case, fields[0].array, node=node) as halo:
        for step in range(5):
            exchange_step(halo, fields, step)


def test_fields_that_share_one_window(node, route):
    """All ranks' fields in one allocation of the leader."""
    case = case_of(node)
    kind = Kind("f4")
    nbytes = Field.nbytes(kind.spread(case.cells[node.rank]).shape, kind)
    window = node.allocate((node.size, 2, nbytes), "u1")
    fields = [
        Field.of(node.xp, case, node.rank, kind, window.array[node.rank, at]) for at in range(2)
    ]
    with plan(node.comm, case, arrays(fields), node=node) as halo:
        for step in range(5):
            exchange_step(halo, fields, 10 * step)


def test_a_window_that_is_closed_after_the_plan_was_made(node, route):
    """The plan goes on with other arrays, and with those that the user still holds."""
    case = case_of(node)
    kind = Kind("f8")
    nbytes = Field.nbytes(kind.spread(case.cells[node.rank]).shape, kind)
    window = node.allocate_each(nbytes, "u1")
    own = [Field.of(node.xp, case, node.rank, kind, window.array)]
    other = make_fields(node, case, node.rank, [kind])
    with plan(node.comm, case, own[0].array, node=node) as halo:
        exchange_step(halo, own, 1)
        with pytest.warns(ResourceWarning, match=window.name):
            window.close()
        node.allocate_each(nbytes, "u1", fill=3)
        for step in range(3):
            for fields in (own, other):
                exchange_step(halo, fields, step, fields[0].array)


# --- several plans


def test_many_plans_alive(node, route):
    """Closed in an order that is not theirs."""
    plans = []
    for number in range(12):
        rng = np.random.default_rng([number, node.size, 2])
        case = random_case(rng, node.size, 1 + number % 3)
        fields = make_fields(node, case, node.rank, [Kind("i4")], [bool(number % 2)])
        opened = plan(node.comm, case, arrays(fields), node=node)
        plans.append((opened, opened.__enter__(), fields))
    order = np.random.default_rng(node.size)
    for step in range(4):
        for at in order.permutation(len(plans)):
            _, halo, fields = plans[at]
            exchange_step(halo, fields, 100 * step + at)
    for at in order.permutation(len(plans)):
        opened, halo, _ = plans[at]
        opened.__exit__(None, None, None)
        assert halo.is_closed
        with pytest.raises(ClosedError):
            halo.exchange()


def test_plans_one_after_another_leave_nothing(host_node, route):
    """Neither files, mappings nor names."""
    node = host_node
    case = case_of(node)
    kinds = [Kind("f8"), Kind("i2")]
    fields = make_fields(node, case, node.rank, kinds, [True, False])

    def one(step):
        with plan(node.comm, case, arrays(fields), node=node) as halo:
            exchange_step(halo, fields, step)

    one(1)
    gc.collect()
    node.barrier()
    before = held()
    node.barrier()
    for step in range(15):
        one(step)
    gc.collect()
    node.barrier()
    assert (held().fds, held().mapped) == (before.fds, before.mapped)


def test_a_plan_is_closed_with_its_node(comm, route):
    with mpishare.Node(comm, timeout_s=40) as node:
        case = case_of(node)
        fields = make_fields(node, case, node.rank, [Kind()])
        cart = make_cart(node.comm, case)
        halo = mpishare.HaloExchange(cart, arrays(fields), case.widths[0], node=node)
        halo.exchange()
        assert not halo.is_closed
    assert halo.is_closed
    with pytest.raises(ClosedError):
        halo.exchange()
    halo.close()  # once more: nothing


def test_close_twice(node, route):
    case = case_of(node)
    fields = make_fields(node, case, node.rank, [Kind()])
    with plan(node.comm, case, arrays(fields), node=node) as halo:
        halo.close()
        halo.close()
    for call in (
        halo.exchange,
        halo.start,
        halo.wait,
        halo.accumulate,
        lambda: halo.exchange(fields[0].array),
    ):
        with pytest.raises(ClosedError):
            call()


def test_a_plan_cannot_be_pickled(node):
    import pickle

    case = case_of(node)
    fields = make_fields(node, case, node.rank, [Kind()])
    with plan(node.comm, case, arrays(fields), node=node) as halo:
        with pytest.raises(TypeError, match="HaloExchange cannot be pickled"):
            pickle.dumps(halo)
        assert "HaloExchange" in repr(halo)

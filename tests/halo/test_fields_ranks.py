"""Which arrays a plan takes: of any dtype and layout, many at once, others at every call."""

import gc
import pickle
import weakref

import numpy as np
import pytest

import mpishare
from mpishare import ClosedError, Layout, MismatchError
from tests.helpers.halos import (
    Field,
    Kind,
    arrays,
    dtypes_and_forms,
    even_case,
    exchange_step,
    exchanging,
    make_fields,
    plan_without_cart,
    read_in_place,
)
from tests.helpers.rings import beside, ring

TWO = pytest.mark.ranks(min=2)
DOUBLES = Kind()


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


def case_of(node):
    """Two axes, neighbors on both sides and itself."""
    return even_case((node.size, 1), True, 3, ((1, 2), (2, 1)), corners=True)


def window_for(node, kind=DOUBLES, count=1):
    """Memory for so many fields, in a window of this rank's own."""
    nbytes = Field.nbytes(kind.spread(case_of(node).cells[node.rank]).shape, kind)
    return node.allocate_each((count, nbytes), "u1")


def field_in(node, memory, kind=DOUBLES):
    return Field.of(node.xp, case_of(node), node.rank, kind, memory)


def test_records_with_gaps(host_node, in_window):
    """Which need not travel."""
    record = np.dtype({"names": [*"ab"], "formats": ["f8", "S70"], "offsets": [8, 20]})
    node, (left, right) = host_node, beside(host_node)
    memory = node.allocate_each(4, record).array if in_window else np.zeros(4, record)

    def value(rank):
        return np.array((rank, b"name %d" % rank), record)

    memory[1:3] = value(node.rank)
    with ring(node, memory) as halo:
        halo.exchange(memory)
    assert (memory[[0, 3]] == [value(left), value(right)]).all()
    with mpishare.NeighborExchange(
        node.comm, {right: [1]}, {left: [3]}, memory, node=node
    ) as neighbors:
        neighbors.exchange(memory)
        assert memory[3] == value(left)
        with pytest.raises(TypeError, match=r"cannot be added. Give the numbers .*x\['a'\]"):
            neighbors.accumulate(memory)
        gc.collect()  # the frames of the error hold the array
    node.barrier()


def test_one_plan_of_everything(node, in_window):
    dtypes, forms = dtypes_and_forms(node)
    kinds = [
        Kind(dtype, forms[at % len(forms)], (2,) * (at % 3), (-2, -1))
        for at, dtype in enumerate(dtypes)
    ]
    with exchanging(node, case_of(node), kinds, in_window) as (halo, fields):
        exchange_step(halo, fields, 1)
        exchange_step(halo, fields, 100)


def plan_for(node, fields):
    return plan_without_cart(node.comm, case_of(node), arrays(fields), axes=(0, 1), node=node)


def test_records_on_a_gpu_are_given_as_bytes(node):
    """There is no such array in CuPy, but a plan for one could be made."""
    if node.backend == "cuda":
        with pytest.raises(TypeError, match=r"have 72 bytes, .* 1 to 16: .*'u1'.* \(6, 72\)"):
            ring(node, Layout(6, "V72"))
    node.barrier()


@TWO
def test_an_array_on_one_rank_and_a_layout_on_another(node):
    with pytest.raises(MismatchError, match="no memory yet") as caught:
        ring(node, Layout(6) if node.rank else node.xp.zeros(6))
    assert "memory'" in str(caught.value)


def test_arrays_are_not_held(host_node):
    case = case_of(host_node)
    with exchanging(host_node, case) as (halo, _):
        for call in (halo.exchange, halo.accumulate):
            (field,) = make_fields(host_node, case)
            call(field.array)
            gone = weakref.ref(field.array)
            del field
            assert gone() is None


@pytest.mark.parametrize("owner", ["another rank", "one rank", "the rank itself"])
def test_fields_in_windows_of_any_rank(node, route, owner):
    """In the memory of a neighbor, or all ranks' fields in one allocation of the leader."""
    if owner == "another rank":
        memory = window_for(node).segment((node.rank + 1) % node.size)
    elif owner == "one rank":
        shape = window_for(node, count=2).array.shape
        memory = node.allocate((node.size, *shape), "u1").array[node.rank]
    else:
        memory = window_for(node, count=2).array
    fields = [field_in(node, each) for each in memory]
    node.synchronize()
    node.barrier()
    with plan_for(node, fields) as halo:
        for step in range(5):
            exchange_step(halo, fields, 10 * step)


def test_a_window_that_is_closed_after_the_plan_was_made(node, route):
    """The plan goes on with other arrays, and with those that the user still holds."""
    window = window_for(node)
    own, other = field_in(node, window.array[0]), field_in(node, None)
    with plan_for(node, [own]) as halo:
        exchange_step(halo, [own], 1)
        with pytest.warns(ResourceWarning, match=window.name):
            window.close()
        window_for(node).array[...] = 3
        for step in range(3):
            for field in (own, other):
                exchange_step(halo, [field], step, field.array)


def test_a_plan_that_was_closed(comm, route):
    """By itself, or with its node; once more is nothing."""
    for closes_itself in (True, False):
        with mpishare.Node(comm, timeout_s=40) as node:
            u = node.xp.zeros(6)
            halo = ring(node, u)
            halo.exchange(u)
            assert not halo.is_closed
            if closes_itself:
                halo.close()
        assert halo.is_closed
        halo.close()
        calls = (halo.exchange, halo.start, halo.wait, halo.accumulate)
        for call in (*calls, lambda halo=halo, u=u: halo.exchange(u)):
            with pytest.raises(ClosedError):
                call()


def test_a_plan_cannot_be_pickled(node):
    with ring(node, node.xp.zeros(6)) as halo:
        with pytest.raises(TypeError, match="HaloExchange cannot be pickled"):
            pickle.dumps(halo)
        assert "HaloExchange" in repr(halo)

"""One plan for any fields of a block: combinations are agreed on at first sight, and kept."""

import gc
import re

import numpy as np
import pytest

import mpishare
from mpishare import ClosedError, EpochError, Layout, PeerError, UnsupportedError
from mpishare.coordination.agreement import Agreement
from mpishare.plans.comm import PlanComm
from tests.helpers.halos import (
    Kind,
    arrays,
    check,
    dtypes_and_forms,
    even_case,
    exchange_by,
    exchange_step,
    make_cart,
    make_fields,
    on_host,
    plan_without_cart,
    put,
    random_case,
    some,
)
from tests.helpers.rings import beside, ring
from tests.helpers.stage import shared_bytes

TWO = pytest.mark.ranks(min=2)
BLOCK = Layout(6, None)  # four cells and two ghosts


def seen(plan):
    return int(re.search(r"any fields, (\d+) seen", repr(plan))[1])


@pytest.fixture
def halo(node):
    return ring(node, BLOCK)


def exchange_kinds(node, halo, *kinds, step=1):
    fields = make_fields(node, even_case((node.size,)), kinds)
    exchange_step(halo, fields, step, *arrays(fields))


@pytest.mark.parametrize("are_last", [True, False])
def test_many_combinations_in_any_order(node, are_last):
    """Of any dtypes, orders in memory and other axes, several fields at once, all ways to call."""
    dtypes, forms = dtypes_and_forms(node)
    for seed in range(some(node, 8)):
        rng = np.random.default_rng([seed, node.size, are_last, 61])
        case = random_case(rng, node.size)
        axes = tuple(range(case.naxes)) if are_last else tuple(range(-case.naxes, 0))
        combinations = []
        for _ in range(4):
            others = [tuple(rng.integers(1, 4, rng.integers(0, 3)).tolist()) for _ in range(2)]
            kinds = [
                Kind(str(rng.choice(dtypes)), str(rng.choice(forms)), each, axes)
                for each in others[: int(rng.integers(1, 3))]
            ]
            combinations.append(kinds)
        block, cut = Layout(case.cells[node.rank].shape, None), None if are_last else axes
        with plan_without_cart(node.comm, case, block, axes=cut, node=node) as halo:
            for step, number in enumerate(rng.integers(0, len(combinations), 14).tolist()):
                fields = make_fields(node, case, combinations[number], step % 5 == 4)
                put(fields, 10 * step)
                exchange_by(halo, *arrays(fields), halves=rng.random() < 0.5)
                check(fields, 10 * step)
            assert seen(halo) <= len(combinations)


def test_what_was_seen_needs_no_agreement(node, halo, monkeypatch):
    """Other arrays alike: neither messages nor a step of the node."""

    def forbidden(*_, **__):
        raise AssertionError("this call must be local")

    kinds = [Kind("f8"), Kind("i4"), Kind("f4", "C", (3,))]
    for given in ([kinds[0]], [kinds[1]], [kinds[2]], kinds):
        exchange_kinds(node, halo, *given)
    assert seen(halo) == 4
    for of in (Agreement, PlanComm):
        monkeypatch.setattr(of, "step_keeping", forbidden)
    for step in range(8):
        exchange_kinds(node, halo, kinds[step % 3], step=step)
        exchange_kinds(node, halo, *kinds, step=step)
    node.comm.Barrier()  # a rank that fails ends the exchange of one that is still in it
    with pytest.raises((AssertionError, PeerError), match="must be local"):
        exchange_kinds(node, halo, Kind("f2"))
    monkeypatch.undo()


def test_strides_that_do_not_matter_are_nothing_new(node, halo):
    """Those of an axis with one element; orders in memory and places of gaps are something new."""
    u = node.xp.zeros((6, 1))
    halo.exchange(u)
    halo.exchange(node.xp.lib.stride_tricks.as_strided(u, (6, 1), (8, 4096)))
    assert seen(halo) == 1
    halo.exchange(node.xp.zeros((6, 4)))
    halo.exchange(node.xp.zeros((6, 4), order="F"))
    halo.exchange(node.xp.zeros((6, 8))[:, ::2])
    assert seen(halo) == 4


def test_the_reverse(node, halo):
    for dtype, others in (("f8", ()), ("i4", (2,)), ("f8", ())):
        u = node.xp.ones((6, *others), dtype)
        halo.accumulate(u)
        flat = on_host(u).reshape(6, -1)
        assert (flat == np.array([0, 2, 1, 1, 2, 0])[:, None]).all()
        halo.exchange(u)
    assert seen(halo) == 2
    with pytest.raises(TypeError, match="accumulate failed: bool cannot be added"):
        halo.accumulate(node.xp.ones(6, "?"))
    halo.exchange(node.xp.ones(6, "?"))


def test_a_call_between_start_and_wait(node, halo):
    """Nothing new is agreed on while an exchange is open."""
    u, v = node.xp.zeros(6), node.xp.zeros(6, "f4")
    for _ in range(2):  # at the first sight, and on the fast path
        halo.start(u)
        for call in (halo.exchange, halo.start, halo.accumulate):
            with pytest.raises(EpochError, match="wait"):
                call(v)
        halo.wait()
    assert seen(halo) == 1
    halo.exchange(v)
    with pytest.raises(EpochError, match="start"):
        halo.wait()


def test_calls_that_fail_on_all_ranks(node):
    """The same error on all, and the plan works on at once, while others are still told."""
    with ring(node, BLOCK, axes=0) as halo:
        seen_before, same = node.xp.zeros(6), node.xp.zeros(6, "f4")
        for wrong, words in [
            (node.xp.zeros(7), r"field 0 of shape \(7,\) has \(7,\) cells along its axes \(0,\)"),
            (node.xp.zeros((6, 6), "f4")[:5], r"has \(5,\) cells .* a block of \(6,\)"),
            (np.zeros(6, "O"), "Python objects" if node.backend == "host" else "not an array"),
            ([0.0] * 6, "list"),
        ]:
            text = rf"^{halo.name}: exchange failed: .*{words}"
            with pytest.raises((TypeError, ValueError), match=text):
                halo.exchange(wrong)
        for name in ("exchange", "start", "accumulate"):
            with pytest.raises(TypeError, match=rf"Pass them: {name}\(u\)"):
                getattr(halo, name)()
        assert seen(halo) == 0
        for _ in range(50):
            halo.exchange(seen_before)
            with pytest.raises(ValueError, match="share memory"):
                halo.exchange(same, same)
        exchange_kinds(node, halo, Kind("f8"))
        assert seen(halo) == 1


def test_a_mesh(node):
    """By places and by global ids; the axis may be any."""
    left, right = beside(node)
    exchange = mpishare.NeighborExchange
    block, ids = Layout(2, None), [node.rank, right]
    sides = {left: [0]}, {right: [1]}
    with (
        exchange(node.comm, *sides, block, node=node) as first,
        exchange.from_global_ids(node.comm, ids, 1, block, node=node) as second,
        exchange(node.comm, *sides, block, axis=-1, node=node) as third,
    ):
        for ex in (first, second, third):
            ghost = (..., 1) if ex is third else 1
            for dtype, others in (("f8", ()), ("i4", (3,)), ("c8", (2, 2)), ("f8", ())):
                shape = (*others, 2) if ex is third else (2, *others)
                u = node.xp.full(shape, node.rank, dtype)
                u[ghost] = -1
                ex.exchange(u)
                assert (on_host(u)[ghost] == right).all()
            assert seen(ex) == 3
            with pytest.raises(ValueError, match="field 0 has 3 places"):
                ex.exchange(node.xp.zeros(3))


def test_it_outlives_its_cart_and_needs_no_node(comm):
    cart = make_cart(comm, even_case((comm.size,)))
    with mpishare.HaloExchange(cart, BLOCK, 1) as halo, mpishare.Node(comm) as node:
        cart.Free()
        for kind in (Kind("f8"), Kind("i4", "C", (2,))):
            exchange_kinds(node, halo, kind)


@pytest.mark.parametrize("is_dropped", [False, True])
def test_its_end(compiled_node, is_dropped):
    """The memory of its combinations goes with it; dropped, by the next collective call."""
    node = compiled_node
    gc.collect()
    node.allocate(1).close()  # closes what earlier tests have dropped, and maps small windows
    before = shared_bytes()
    halo = ring(node, BLOCK)
    for count in (1 << 17, 1 << 18):
        exchange_kinds(node, halo, Kind("f8", "F", (count,)))
    assert node.size == 1 or shared_bytes() > before
    if is_dropped:
        del halo
        gc.collect()
        node.allocate(1).close()
    else:
        halo.close()
        with pytest.raises(ClosedError):
            halo.exchange(node.xp.zeros(6))
    assert shared_bytes() == before


def test_a_sight_that_fails_on_one_rank(node, halo, monkeypatch):
    """Is an error on all, leaves nothing, and can be tried again."""

    def fail(*_, **__):
        raise MemoryError("no memory here")

    exchange_kinds(node, halo, Kind("f8"))
    is_bad = node.rank == node.size - 1
    places = [f"host.engine.{name}.lay_out" for name in ("CompiledRoute", "MessageRoute")]
    if node.backend == "cuda":
        places = ["cuda.engine.CudaEngine._build"]
    for place in places if is_bad else ():
        monkeypatch.setattr(f"mpishare.plans.exchange.{place}", fail)
    with pytest.raises(MemoryError if is_bad else PeerError, match="no memory here"):
        exchange_kinds(node, halo, Kind("i4"))
    monkeypatch.undo()
    assert seen(halo) == 1
    for dtype in ("f8", "i4"):
        exchange_kinds(node, halo, Kind(dtype))


def test_plans_that_are_refused(node):
    """Layouts without a dtype, and routes, before there is any field."""
    for fields, words in [
        ([BLOCK, BLOCK], "give it alone"),
        ([BLOCK, Layout(6)], "give it alone"),
        (Layout((6, 6), None), "1 here, and no others"),
    ]:
        with pytest.raises(ValueError, match=words):
            ring(node, fields)
    with pytest.raises(ValueError, match="one axis here"):
        mpishare.NeighborExchange(node.comm, {}, {}, Layout((6, 6), None), node=node)
    with pytest.raises(TypeError, match="one dtype"):
        mpishare.Allreduce(node.comm, BLOCK, node=node)
    with pytest.raises(ValueError, match="any order"):
        Layout(6, None, "F")
    with pytest.raises(UnsupportedError, match="require"):
        ring(node, BLOCK, require="mpi")

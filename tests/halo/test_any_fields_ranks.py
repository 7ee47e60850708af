"""One plan for any fields of a block: combinations are agreed on at first sight, and kept."""

import gc
import logging

import numpy as np
import pytest

import mpishare
from mpishare import ClosedError, EpochError, Layout, MismatchError, PeerError, UnsupportedError
from mpishare.coordination.agreement import Agreement
from mpishare.coordination.rank_group import RankGroup
from mpishare.halo import any_fields
from tests.helpers.halos import (
    DTYPES,
    FORMS,
    HOST_DTYPES,
    HOST_FORMS,
    Kind,
    arrays,
    check,
    even_case,
    exchange_by,
    exchange_step,
    make_cart,
    make_fields,
    on_host,
    put,
    random_case,
    some,
)

TWO = pytest.mark.ranks(min=2)


def seen(plan):
    """How many combinations it knows."""
    return len(plan._fields.setups) - 1


def plan_of(node, case, **options):
    options = {"dims": case.dims, "periods": case.periods, "node": node, **options}
    block = Layout(case.cells[node.rank].shape, None)
    width = case.widths[node.rank]
    return mpishare.HaloExchange(node.comm, block, width, corners=case.corners, **options)


def row(node, **options):
    """A periodic row of ranks with four cells and two ghosts each, and its plan."""
    case = even_case((node.size,))
    return case, plan_of(node, case, **options)


def try_exchange(halo, case, node, *kinds, step=1, in_window=None):
    fields = make_fields(node, case, node.rank, list(kinds), in_window)
    exchange_step(halo, fields, step, *arrays(fields))


@pytest.fixture
def alone(monkeypatch):
    """A context in which a rank that agrees with others on anything fails."""

    def forbidden(*_, **__):
        raise AssertionError("this call must be local")

    def enter():
        monkeypatch.setattr(Agreement, "step_keeping", forbidden)
        monkeypatch.setattr(RankGroup, "step_keeping", forbidden)

    yield enter
    monkeypatch.undo()


@pytest.mark.parametrize("are_last", [True, False])
def test_many_combinations_in_any_order(node, are_last):
    """Of any dtypes, orders in memory and other axes, several fields at once, all ways to call."""
    odd = node.backend == "host"
    dtypes, forms = (DTYPES + HOST_DTYPES, HOST_FORMS) if odd else (DTYPES, FORMS)
    for seed in range(some(node, 8)):
        rng = np.random.default_rng([seed, node.size, are_last, 61])
        case = random_case(rng, node.size)
        axes = tuple(range(case.naxes)) if are_last else tuple(range(-case.naxes, 0))
        combinations = []
        for _ in range(4):
            others = [tuple(rng.integers(1, 4, rng.integers(0, 3)).tolist()) for _ in range(2)]
            count = int(rng.integers(1, 3))
            combinations.append(
                [
                    Kind(str(rng.choice(dtypes)), str(rng.choice(forms)), others[n], axes)
                    for n in range(count)
                ]
            )
        with plan_of(node, case, axes=None if are_last else axes) as halo:
            for step, number in enumerate(rng.integers(0, len(combinations), 14).tolist()):
                kinds = combinations[number]
                fields = make_fields(node, case, node.rank, kinds, [step % 5 == 4] * len(kinds))
                put(fields, 10 * step)
                exchange_by(halo, *arrays(fields), halves=rng.random() < 0.5)
                check(fields, 10 * step)
            assert seen(halo) <= len(combinations)


def test_what_was_seen_needs_no_agreement(node, alone):
    """Other arrays alike: neither messages nor a step of the node."""
    kinds = [Kind("f8"), Kind("i4"), Kind("f4", "C", (3,))]
    case, halo = row(node)
    for kind in kinds:
        try_exchange(halo, case, node, kind)
    try_exchange(halo, case, node, *kinds)
    assert seen(halo) == 4
    alone()
    for step in range(8):
        try_exchange(halo, case, node, kinds[step % 3], step=step)
        try_exchange(halo, case, node, *kinds, step=step)
    with pytest.raises((AssertionError, PeerError), match="must be local"):
        try_exchange(halo, case, node, Kind("f2"))


def test_strides_that_do_not_matter_are_nothing_new(node):
    """Those of an axis with one element; orders in memory and places of gaps are something new."""
    _, halo = row(node)
    u = node.xp.zeros((6, 1))
    halo.exchange(u)
    halo.exchange(node.xp.lib.stride_tricks.as_strided(u, (6, 1), (8, 4096)))
    assert seen(halo) == 1
    halo.exchange(node.xp.zeros((6, 4)))
    halo.exchange(node.xp.zeros((6, 4), order="F"))
    halo.exchange(node.xp.zeros((6, 8))[:, ::2])
    assert seen(halo) == 4


def test_the_reverse(node):
    _, halo = row(node)
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


def test_numbers_that_numpy_has_as_bytes_alone(host_node):
    """So it is with those of PyTorch's bfloat16 where ml_dtypes is not installed."""
    _, halo = row(host_node)
    with pytest.raises(TypeError, match=r"V2 cannot be added \(bfloat16 .* ml_dtypes is installed"):
        halo.accumulate(np.zeros(6, "V2"))
    with pytest.raises(TypeError, match=r"accumulate failed: \|V3 cannot be added$"):
        halo.accumulate(np.zeros(6, "V3"))


def test_a_call_between_start_and_wait(node):
    """Nothing new is agreed on while an exchange is open."""
    _, halo = row(node)
    u, v = node.xp.zeros(6), node.xp.zeros(6, "f4")
    for _ in range(2):  # at the first sight, and on the fast path
        halo.start(u)
        for name in ("exchange", "start", "accumulate"):
            with pytest.raises(EpochError, match="wait"):
                getattr(halo, name)(v)
        halo.wait()
    assert seen(halo) == 1
    halo.exchange(v)
    with pytest.raises(EpochError, match="start"):
        halo.wait()


def test_a_call_without_arrays(node):
    _, halo = row(node)
    for name in ("exchange", "start", "accumulate"):
        with pytest.raises(TypeError, match=rf"Pass them: {name}\(u\)"):
            getattr(halo, name)()


def test_fields_that_do_not_fit(node):
    """The same error on all ranks, and the plan works on."""
    case, halo = row(node, axes=0)
    for wrong, words in [
        (node.xp.zeros(7), r"field 0 of shape \(7,\) has \(7,\) cells along its axes \(0,\)"),
        (node.xp.zeros((6, 6), "f4")[:5], r"has \(5,\) cells .* a block of \(6,\)"),
        (np.zeros(6, "O"), "Python objects" if node.backend == "host" else "not an array"),
        ([0.0] * 6, "list"),
    ]:
        with pytest.raises(
            (TypeError, ValueError), match=rf"^{halo.name}: exchange failed: .*{words}"
        ):
            halo.exchange(wrong)
    assert seen(halo) == 0
    try_exchange(halo, case, node, Kind("f8"))


def test_a_call_after_one_that_failed_on_all_ranks(node):
    """It may be made at once, while others still wait to be told of the failure."""
    _, halo = row(node)
    seen_before, same = node.xp.zeros(6), node.xp.zeros(6, "f4")
    halo.exchange(seen_before)
    for _ in range(50):
        with pytest.raises(ValueError, match="share memory"):
            halo.exchange(same, same)
        halo.exchange(seen_before)
    assert seen(halo) == 1


@TWO
def test_another_new_combination_on_one_rank(node):
    """All are told each other's, and the plan works on."""
    case, halo = row(node)
    for mine, words in [
        (node.xp.zeros(6, "f4" if node.rank else "f8"), "float32"),
        (node.xp.zeros((6, 2 + node.rank)), "other axes"),
    ]:
        with pytest.raises(MismatchError, match=words):
            halo.exchange(mine)
    try_exchange(halo, case, node, Kind("f8"))


@TWO
def test_a_wrong_array_on_one_rank(node):
    case, halo = row(node)
    with pytest.raises(PeerError if node.rank else ValueError, match="a block of"):
        halo.exchange(node.xp.zeros(6 if node.rank else 8))
    assert seen(halo) == 0
    try_exchange(halo, case, node, Kind("f8"))


def test_a_mesh(node):
    """By places and by global ids; the axis may be any."""
    right, left = (node.rank + 1) % node.size, (node.rank - 1) % node.size
    exchange = mpishare.NeighborExchange
    block, ids = Layout(2, None), [node.rank, right]
    with (
        exchange(node.comm, {left: [0]}, {right: [1]}, block, node=node) as first,
        exchange.from_global_ids(node.comm, ids, 1, block, node=node) as second,
        exchange(node.comm, {left: [0]}, {right: [1]}, block, axis=-1, node=node) as third,
    ):
        for ex in (first, second, third):
            for dtype, others in (("f8", ()), ("i4", (3,)), ("c8", (2, 2)), ("f8", ())):
                u = node.xp.full((2, *others), node.rank, dtype)
                if ex is third:
                    u = node.xp.moveaxis(u, 0, -1)
                u[(..., 1) if ex is third else 1] = -1
                ex.exchange(u)
                assert (on_host(u)[(..., 1) if ex is third else 1] == right).all()
            assert seen(ex) == 3
            with pytest.raises(ValueError, match="field 0 has 3 places"):
                ex.exchange(node.xp.zeros(3))


def test_slices(node):
    """Those of the axes that are cut, whatever the fields have beside them."""
    case = even_case((node.size, 1))
    cut = (slice(1, 5), slice(1, 5))
    with plan_of(node, case) as halo:
        assert halo.owned == cut
        assert halo.shifted(halo.owned, 1, -1) == (slice(1, 5), slice(0, 4))
        with pytest.raises(ValueError, match="have no axis 2"):
            halo.shifted(halo.owned, 2, 1)
    with plan_of(node, case, axes=(-2, -1)) as halo:
        assert halo.owned == (..., *cut)
        assert halo.shifted(halo.owned, -1, 1) == (..., slice(1, 5), slice(2, 6))
    turned = Layout((7, 6), None)  # as the fields lie
    halo = mpishare.HaloExchange(
        node.comm, turned, 1, axes=(1, 0), dims=(node.size, 1), periods=True, node=node
    )
    assert halo.owned == (slice(1, 6), slice(1, 5))
    u = node.xp.zeros((7, 6, 2))
    u[halo.owned] = node.rank
    halo.exchange(u)
    assert (on_host(u)[1:-1, 0] == (node.rank - 1) % node.size).all()


def test_it_outlives_its_cart_and_needs_no_node(comm):
    case = even_case((comm.size,))
    cart = make_cart(comm, case)
    halo = mpishare.HaloExchange(cart, Layout(6, None), 1)
    cart.Free()
    node = halo._setup.node
    for kind in (Kind("f8"), Kind("i4", "C", (2,))):
        try_exchange(halo, case, node, kind)
    halo.close()
    assert node.is_closed


def test_its_end(node):
    """All that was made for its combinations goes with it."""
    before = len(node._context.children)
    case, halo = row(node)
    for kind in (Kind("f8"), Kind("i4"), Kind("f8", "C", (100,))):
        try_exchange(halo, case, node, kind)
    assert len(node._context.children) == before + 1
    assert halo.staging_nbytes > 0
    assert "any fields, 3 seen" in repr(halo)
    assert set(halo.routes) <= set(range(node.size))
    group = halo._setup.group
    plans = group.plans
    halo.close()
    assert group.plans == plans - 4
    with pytest.raises(ClosedError):
        halo.exchange(node.xp.zeros(6))


def test_dropped(node):
    """It is closed by the next collective call, with all its combinations."""
    case, halo = row(node)
    for kind in (Kind("f8"), Kind("i4")):
        try_exchange(halo, case, node, kind)
    group, before = halo._setup.group, halo._setup.group.plans
    del halo
    gc.collect()
    node.allocate(1).close()
    assert group.plans == before - 3


def test_a_sight_that_fails_on_one_rank(node, monkeypatch):
    """Is an error on all, leaves nothing, and can be tried again."""
    case, halo = row(node)
    try_exchange(halo, case, node, Kind("f8"))
    plans = halo._setup.group.plans

    def fail(*_, **__):
        raise MemoryError("no memory here")

    is_bad = node.rank == node.size - 1
    if is_bad and node.backend == "cuda":
        monkeypatch.setattr("mpishare.halo.cuda.engine.CudaEngine._build", fail)
    elif is_bad:
        for name in ("CompiledRoute", "ReferenceRoute"):
            monkeypatch.setattr(f"mpishare.halo.host.engine.{name}.lay_out", fail)
    with pytest.raises(MemoryError if is_bad else PeerError, match="no memory here"):
        try_exchange(halo, case, node, Kind("i4"))
    monkeypatch.undo()
    assert (halo._setup.group.plans, seen(halo)) == (plans, 1)
    try_exchange(halo, case, node, Kind("f8"))
    try_exchange(halo, case, node, Kind("i4"))


def test_many_are_said(node, monkeypatch, caplog):
    monkeypatch.setattr(any_fields, "MANY", 3)
    case, halo = row(node)
    with caplog.at_level(logging.INFO, logger="mpishare"):
        for count in range(1, 5):
            try_exchange(halo, case, node, Kind("f8", "C", (count,)))
    texts = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert [text for text in texts if "has seen 3 combinations" in text] == [
        text for text in texts if "combinations" in text
    ]
    texts = [text for text in texts if "combinations" in text]
    assert len(texts) == (node.rank == 0)
    assert all(("a stream" in text) == (node.backend == "cuda") for text in texts)
    assert any("float64(6, 2) first" in r.getMessage() for r in caplog.records)


def test_the_name_of_a_combination():
    """The same on all ranks, and short however many fields there are."""
    same = {"dtypes": ["float64", "int32"], "other axes": [[], [4, 2]]}
    assert any_fields._name(same) == "float64, int32[4, 2]"
    many = {"dtypes": ["float64"] * 6, "other axes": [[]] * 6}
    assert any_fields._name(many) == "float64, float64, float64, float64, 2 more fields"


def test_layouts_without_dtype_that_are_refused(node):
    block, options = Layout(6, None), {"dims": (node.size,), "node": node}
    for fields, words in [
        ([block, block], "give it alone"),
        ([block, Layout(6)], "give it alone"),
        (Layout((6, 6), None), "1 here, and no others"),
    ]:
        with pytest.raises(ValueError, match=words):
            mpishare.HaloExchange(node.comm, fields, 1, **options)
    with pytest.raises(ValueError, match="one axis here"):
        mpishare.NeighborExchange(node.comm, {}, {}, Layout((6, 6), None), node=node)
    with pytest.raises(TypeError, match="one dtype"):
        mpishare.Allreduce(node.comm, block, node=node)
    with pytest.raises(ValueError, match="any order"):
        Layout(6, None, "F")


@TWO
def test_a_dtype_on_one_rank(node):
    with pytest.raises(MismatchError, match="any"):
        mpishare.HaloExchange(
            node.comm, Layout(6, "f8" if node.rank else None), 1, dims=(node.size,), node=node
        )


def test_routes_are_refused_before_any_field(node):
    with pytest.raises(UnsupportedError, match="require"):
        row(node, require="mpi")

"""Plans that are made before there are arrays: a Layout stands for a field."""

import doctest

import numpy
import numpy as np
import pytest

import mpishare
from mpishare import Layout, MismatchError
from mpishare.plans import layout
from tests.helpers.halos import (
    Field,
    Kind,
    arrays,
    check,
    even_case,
    make_fields,
    on_host,
    put,
    random_case,
    some,
)

TWO = pytest.mark.ranks(min=2)


def like(field):
    """The Layout of an array."""
    order = "F" if field.flags.f_contiguous and not field.flags.c_contiguous else "C"
    return Layout(field.shape, field.dtype, order)


def plan_of(comm, case, layouts, **options):
    options = {"dims": case.dims, "periods": case.periods, **options}
    width = case.widths[comm.rank]
    return mpishare.HaloExchange(comm, layouts, width, corners=case.corners, **options)


def test_any_arrays_of_the_layout(node):
    """Of either order, others at each call; also in windows."""
    for seed in range(some(node, 12)):
        rng = np.random.default_rng([seed, node.size, 31])
        case = random_case(rng, node.size)
        axes = tuple(range(case.naxes))
        others = (2,) * (seed % 2)
        kinds = [Kind("f8", "C", others, axes), Kind("i4", "F", others, axes)]
        fields = make_fields(node, case, node.rank, kinds)
        layouts = [like(each) for each in arrays(fields)]
        with plan_of(node.comm, case, layouts, axes=axes, node=node) as halo:
            for step in range(3):
                if step:
                    fields = make_fields(node, case, node.rank, kinds, [step == 2] * 2)
                put(fields, 10 * step)
                halo.exchange(*arrays(fields))
                check(fields, 10 * step)


def test_the_backend_is_that_of_the_node(host_node):
    """On a GPU machine too."""
    case = even_case((host_node.size,))
    with plan_of(host_node.comm, case, Layout(6), node=host_node) as halo:
        field = Field.of(np, case, host_node.rank, Kind())
        put([field], 1)
        halo.exchange(field.array)
        check([field], 1)


def test_without_a_node(comm):
    """The backend is the one that a node picks; the next such plan has the same node."""
    case = even_case((comm.size,))
    plans = [plan_of(comm, case, Layout(6)) for _ in range(2)]
    node = plans[0]._setup.node
    assert plans[1]._setup.node is node
    for plan in plans:
        field = Field.of(node.xp, case, comm.rank, Kind())
        put([field], 1)
        plan.exchange(field.array)
        check([field], 1)
        plan.close()
    assert node.is_closed


@pytest.mark.parametrize("are_mixed", [False, True])
def test_a_call_without_arrays(node, are_mixed):
    """It says what is missing, and the plan works on."""
    case = even_case((node.size,))
    fields = make_fields(node, case, node.rank, [Kind(), Kind()])
    given = [arrays(fields)[0] if are_mixed else Layout(6), Layout((6,))]
    with plan_of(node.comm, case, given, node=node) as halo:
        for name in ("exchange", "start", "accumulate"):
            text = rf"HaloExchange \d+: {name} failed: .* Layout .*Pass them: {name}\(u\)"
            with pytest.raises(TypeError, match=text):
                getattr(halo, name)()
        put(fields, 1)
        halo.start(*arrays(fields))
        halo.wait()
        check(fields, 1)


def test_arrays_of_another_layout(node):
    case = even_case((node.size, 1))
    with plan_of(node.comm, case, Layout((6, 6), "f4"), node=node) as halo:
        for wrong, words in [
            (node.xp.zeros((6, 6)), "dtype float64 instead of float32"),
            (node.xp.zeros((6, 6), "f4", order="F"), "strides"),
            (node.xp.zeros((6, 5), "f4"), "shape"),
        ]:
            with pytest.raises(ValueError, match=words):
                halo.exchange(wrong)


def test_the_reverse(node):
    case = even_case((node.size,))
    with plan_of(node.comm, case, Layout(6), node=node) as halo:
        u = node.xp.ones(6)
        halo.accumulate(u)
        assert on_host(u).tolist() == [0, 2, 1, 1, 2, 0]


def test_neighbors(node):
    right = (node.rank + 1) % node.size
    left = (node.rank - 1) % node.size
    exchange = mpishare.NeighborExchange
    ids = [node.rank, right]
    with (
        exchange(node.comm, {left: [0]}, {right: [1]}, Layout((2, 3)), node=node) as first,
        exchange.from_global_ids(node.comm, ids, 1, Layout((2, 3)), node=node) as second,
    ):
        for ex in (first, second):
            u = node.xp.full((2, 3), float(node.rank))
            u[1] = -1
            ex.exchange(u)
            assert on_host(u)[1].tolist() == [right] * 3
            with pytest.raises(TypeError, match=r"Pass them: exchange\(u\)"):
                ex.exchange()


def test_layouts_that_cannot_be_exchanged(node):
    for wrong, kind in [
        (Layout(6, "O"), TypeError),
        (Layout(6, "V17"), TypeError),
        (Layout(1), ValueError),
        (Layout((6, 6)), ValueError),
    ]:
        with pytest.raises(kind):
            mpishare.HaloExchange(node.comm, wrong, 1, dims=(node.size,), node=node)


@TWO
def test_an_array_on_one_rank_and_a_layout_on_another(node):
    given = Layout(6) if node.rank else node.xp.zeros(6)
    with pytest.raises(MismatchError, match="no memory yet") as caught:
        mpishare.HaloExchange(node.comm, given, 1, dims=(node.size,), node=node)
    assert "memory'" in str(caught.value)


def test_the_example_of_the_docstring():
    names = vars(mpishare) | {"numpy": numpy}
    (example,) = doctest.DocTestFinder(recurse=False).find(layout.Layout, "Layout", globs=names)
    result = doctest.DocTestRunner().run(example)
    assert (result.failed, result.attempted) == (0, 12)

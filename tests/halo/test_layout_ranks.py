"""Plans that are made before there are arrays: a Layout stands for a field."""

import numpy as np
import pytest

import mpishare
from mpishare import Layout, MismatchError
from tests.helpers.halos import (
    Field,
    Kind,
    arrays,
    check,
    even_case,
    exchange_step,
    make_fields,
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
                exchange_step(halo, fields, 10 * step, *arrays(fields))


def test_the_backend_is_that_of_the_node(host_node):
    """On a GPU machine too."""
    case = even_case((host_node.size,))
    with plan_of(host_node.comm, case, Layout(6), node=host_node) as halo:
        field = Field.of(np, case, host_node.rank, Kind())
        exchange_step(halo, [field], 1, field.array)


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

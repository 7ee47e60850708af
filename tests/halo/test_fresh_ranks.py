"""Arrays that are new at each call, on the host."""

import weakref
from unittest import mock

import numpy as np
import pytest

from mpishare.halo.host import parts
from tests.helpers.halos import (
    DTYPES,
    FORMS,
    HOST_DTYPES,
    HOST_FORMS,
    Kind,
    arrays,
    check,
    even_case,
    make_fields,
    plan,
    put,
)


def case_of(node):
    """Neighbors on both sides, and the rank itself along the second axis."""
    return even_case((node.size, 1), True, 3, ((1, 2), (2, 1)), corners=True)


def exchange(halo, fields, way):
    if way == "exchange":
        halo.exchange(*arrays(fields))
    else:
        halo.start(*arrays(fields))
        halo.wait()


@pytest.mark.parametrize("way", ["exchange", "start and wait"])
def test_every_dtype_and_layout(host_node, way):
    case = case_of(host_node)
    kinds = [Kind(dtype) for dtype in (*DTYPES, *HOST_DTYPES)] + [
        Kind("f8", form) for form in {*FORMS, *HOST_FORMS}
    ]
    for kind in kinds:
        first = make_fields(host_node, case, host_node.rank, [kind])
        with plan(host_node.comm, case, first[0].array, node=host_node) as halo:
            for step in range(4):
                fields = make_fields(host_node, case, host_node.rank, [kind])
                put(fields, 10 * step)
                exchange(halo, fields, way)
                check(fields, 10 * step)


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


def test_views_of_windows_and_private_arrays_in_turn(host_node):
    """A rank passes arrays of one kind while its neighbor passes some of the other."""
    node = host_node
    case, kinds = case_of(node), [Kind("f8"), Kind("u1", "F")]
    limits = {"_MIN_IN_PLACE_NBYTES": 0, "_MIN_RUN_NBYTES": 0}
    with mock.patch.multiple(parts, **limits):
        in_windows = make_fields(node, case, node.rank, kinds, [True, True])
        with plan(node.comm, case, arrays(in_windows), node=node) as halo:
            for step in range(12):
                is_private = (step // 2 + node.rank) % 2
                fields = make_fields(node, case, node.rank, kinds) if is_private else in_windows
                put(fields, 10 * step)
                halo.exchange(*(array[...] for array in arrays(fields)))
                check(fields, 10 * step)


def test_accumulate(host_node):
    """The ghosts of a new array at each call are added as those of one that is kept."""
    case, kind = case_of(host_node), Kind("i8")
    (kept,) = make_fields(host_node, case, host_node.rank, [kind])
    with plan(host_node.comm, case, kept.array, node=host_node) as halo:
        for step in range(4):
            given = np.random.default_rng([host_node.rank, step]).integers(9, size=kept.array.shape)
            new = kept.array.copy()
            kept.array[...] = new[...] = given
            halo.accumulate(kept.array)
            halo.accumulate(new)
            assert (new == kept.array).all()
            assert (new != given).any()


SPOILED = pytest.mark.parametrize(
    "spoil",
    [
        lambda array: array[:-1],
        lambda array: array.astype("f4"),
        np.asfortranarray,
        lambda array: np.broadcast_to(array[:1], array.shape),
    ],
    ids=["shape", "dtype", "strides", "read-only"],
)


@SPOILED
def test_an_unfit_array_is_an_error(host_node, spoil):
    case = even_case((host_node.size, 1), True, 3, ((1, 2), (2, 1)))
    (field,) = make_fields(host_node, case, host_node.rank, [Kind("f8")])
    with plan(host_node.comm, case, field.array, node=host_node) as halo:
        with pytest.raises(ValueError, match=r": a field (has another layout|is read-only)"):
            halo.exchange(spoil(field.array))
        field.put(7)
        halo.exchange(field.array)
        check([field], 7)


@SPOILED
def test_an_unfit_array_of_several_is_named_by_its_number(host_node, spoil):
    case = even_case((host_node.size, 1), True, 3, ((1, 2), (2, 1)))
    given = arrays(make_fields(host_node, case, host_node.rank, [Kind("f8")] * 3))
    with plan(host_node.comm, case, given, node=host_node) as halo:
        with pytest.raises(ValueError, match=r": field 1 (has another layout|is read-only)"):
            halo.exchange(given[0], spoil(given[1]), given[2])
        with pytest.raises(TypeError, match=r": field 2 is not an array"):
            halo.exchange(*given[:2], [1.0])

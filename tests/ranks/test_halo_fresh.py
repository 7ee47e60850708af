"""Arrays that are new at each call, on the host: copied by the plan's keys, and never bound."""

import itertools
import weakref
from unittest import mock

import numpy as np
import pytest

from mpishare.halo.host import engine, parts
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


def bound(halo):
    """How many calls of the plan are bound to their arrays."""
    return len(halo._forward._seen)


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
            assert not bound(halo)


def test_an_array_is_bound_at_its_second_call(host_node):
    case, kinds = case_of(host_node), [Kind("f4"), Kind("c16", "F")]
    fields = make_fields(host_node, case, host_node.rank, kinds)
    with plan(host_node.comm, case, arrays(fields), node=host_node) as halo:
        for step in range(4):
            put(fields, 10 * step)
            halo.exchange(*arrays(fields))
            check(fields, 10 * step)
            assert bound(halo) == (step > 0)


def test_arrays_are_not_held(host_node):
    case, kind = case_of(host_node), Kind("f8")
    first = make_fields(host_node, case, host_node.rank, [kind])
    with plan(host_node.comm, case, first[0].array, node=host_node) as halo:
        (field,) = make_fields(host_node, case, host_node.rank, [kind])
        halo.exchange(field.array)
        gone = weakref.ref(field.array)
        del field
        assert gone() is None
        for _ in range(2 * engine._MAX_CACHED):
            halo.exchange(np.empty_like(first[0].array))
        assert len(halo._forward._once) <= engine._MAX_CACHED


def test_more_arrays_in_turn_than_are_kept(host_node):
    """Which calls are bound changes all the time."""
    case, kind = case_of(host_node), Kind("i2")
    with mock.patch.object(engine, "_MAX_CACHED", 3):
        for count in (3, 4, 7):
            pool = [make_fields(host_node, case, host_node.rank, [kind]) for _ in range(count)]
            with plan(host_node.comm, case, pool[0][0].array, node=host_node) as halo:
                for step, fields in enumerate(itertools.islice(itertools.cycle(pool), 5 * count)):
                    put(fields, step)
                    halo.exchange(fields[0].array)
                    check(fields, step)
                    assert bound(halo) <= 3


def test_views_of_windows_and_private_arrays_in_turn(host_node):
    """A rank passes an array of one kind while its neighbor passes one of the other."""
    case, kinds = case_of(host_node), [Kind("f8"), Kind("u1", "F")]
    with mock.patch.object(parts, "_MIN_IN_PLACE_NBYTES", 0):
        in_windows = make_fields(host_node, case, host_node.rank, kinds, [True, True])
        with plan(host_node.comm, case, arrays(in_windows), node=host_node) as halo:
            for step in range(12):
                is_private = (step // 2 + host_node.rank) % 2
                fields = (
                    make_fields(host_node, case, host_node.rank, kinds)
                    if is_private
                    else in_windows
                )
                put(fields, 10 * step)
                halo.exchange(*(array[...] for array in arrays(fields)))
                check(fields, 10 * step)
            # Those in windows are bound, by their addresses, where a neighbor reads them in place.
            assert len(halo._forward._host._calls) == (host_node.size > 1)


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
def test_an_unfit_array_is_an_error(host_node, spoil):
    case = even_case((host_node.size, 1), True, 3, ((1, 2), (2, 1)))
    (field,) = make_fields(host_node, case, host_node.rank, [Kind("f8")])
    with plan(host_node.comm, case, field.array, node=host_node) as halo:
        with pytest.raises(ValueError, match=r"another layout|read-only"):
            halo.exchange(spoil(field.array))
        field.put(7)
        halo.exchange(field.array)
        check([field], 7)

"""Arrays that are new at each call, on the host: copied by the plan's keys, and never bound.

Only Python binds copies to arrays; the compiled part takes their addresses at each call.
"""

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


def test_an_array_is_bound_at_its_second_call(python_node):
    case, kinds = case_of(python_node), [Kind("f4"), Kind("c16", "F")]
    fields = make_fields(python_node, case, python_node.rank, kinds)
    with plan(python_node.comm, case, arrays(fields), node=python_node) as halo:
        for step in range(4):
            put(fields, 10 * step)
            halo.exchange(*arrays(fields))
            check(fields, 10 * step)
            assert bound(halo) == (step > 0)


def test_arrays_are_not_held(python_node):
    case, kind = case_of(python_node), Kind("f8")
    first = make_fields(python_node, case, python_node.rank, [kind])
    with plan(python_node.comm, case, first[0].array, node=python_node) as halo:
        (field,) = make_fields(python_node, case, python_node.rank, [kind])
        halo.exchange(field.array)
        gone = weakref.ref(field.array)
        del field
        assert gone() is None
        for _ in range(2 * engine._MAX_CACHED):
            halo.exchange(np.empty_like(first[0].array))
        assert len(halo._forward._once) <= engine._MAX_CACHED


def test_more_arrays_in_turn_than_are_kept(python_node):
    """Which calls are bound changes all the time."""
    case, kind = case_of(python_node), Kind("i2")
    with mock.patch.object(engine, "_MAX_CACHED", 3):
        for count in (3, 4, 7):
            pool = [make_fields(python_node, case, python_node.rank, [kind]) for _ in range(count)]
            with plan(python_node.comm, case, pool[0][0].array, node=python_node) as halo:
                for step, fields in enumerate(itertools.islice(itertools.cycle(pool), 5 * count)):
                    put(fields, step)
                    halo.exchange(fields[0].array)
                    check(fields, step)
                    assert bound(halo) <= 3


def take_turns(node, halo_made=lambda halo: None):
    """A rank passes arrays of one kind while its neighbor passes some of the other."""
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
            halo_made(halo)


def test_views_of_windows_and_private_arrays_in_turn(host_node):
    take_turns(host_node)


def test_views_of_windows_are_bound_in_python(python_node):
    """By their addresses, where a neighbor reads them in place."""

    def look(halo):
        assert len(halo._forward._host._calls) == (python_node.size > 1)

    take_turns(python_node, look)


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

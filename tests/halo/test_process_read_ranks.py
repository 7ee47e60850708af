"""Large faces of fields in private memory, which receivers read from the sender's process."""

from unittest import mock

import numpy as np
import pytest

import mpishare
from mpishare.plans.exchange.host import parts, process_read
from tests.helpers.halos import (
    Case,
    Kind,
    arrays,
    beside,
    check,
    even_case,
    exchange_by,
    make_fields,
    plan,
    put,
    ring,
)

pytestmark = pytest.mark.ranks(min=2)
PLANES = 24 << 10  # numbers of 8 bytes in a face: 192 KiB


@pytest.fixture(autouse=True)
def read_from_64_kib_on():
    with mock.patch.object(parts, "_MIN_READ_NBYTES", 64 << 10):
        yield


def steps(node, case, kinds):
    """Exchange two sets of fields in turn; return the bytes of staging."""
    both = [make_fields(node, case, kinds) for _ in range(2)]
    with plan(node.comm, case, arrays(both[0]), axes=kinds[0].axes, node=node) as halo:
        for step in range(6):
            fields = both[step % 2]
            put(fields, 10 * step)
            halo.exchange(*arrays(fields))
            for field in fields:
                kept = field.array[field.owned].copy()
                field.spoil()
                field.array[field.owned] = kept
            check(fields, 10 * step)
        return halo.staging_nbytes


@pytest.mark.parametrize("memory", ["plain", "of a driver"])
def test_faces_that_come_as_they_belong(compiled_node, monkeypatch, memory):
    """Out of memory that no other process can read, such as pinned, they are copied before."""
    node = compiled_node
    if memory == "of a driver" and node.rank % 2:
        monkeypatch.setattr(process_read.ReadTrial, "at", lambda *_: False)
    case = even_case((node.size,), True, 5, 2)
    kind = Kind("f8", others=(PLANES,), axes=(0,))
    assert steps(node, case, [kind]) < 100_000  # no copies: a face alone has 384 KiB


@pytest.mark.parametrize(("form", "width"), [("C", 1), ("F", 2)])
def test_faces_with_ghosts_in_between(compiled_node, form, width):
    """They come through memory of the receiver, some planes at a time."""
    node = compiled_node
    dims = (node.size, 1, 1) if form == "C" else (1, 1, node.size)
    splits = [(4,) * node.size, (300,), (300,)]
    case = Case(dims, (True,) * 3, tuple(splits[:: 1 if form == "C" else -1]),
                (((width, width),) * 3,) * node.size, corners=False)  # fmt: skip
    # A buffer of 256 KiB at most, where the faces of a rank would need more than twice a MiB.
    assert steps(node, case, [Kind("f4", form), Kind("i8", form)]) < (256 << 10) + 100_000


@pytest.mark.parametrize("way", ["exchange", "start and wait"])
def test_new_arrays_kept_ones_and_windows_in_turn(compiled_node, way):
    """Each rank another kind, one of two fields by itself too: only the owner knows which."""
    node = compiled_node
    case = even_case((node.size,), True, 5, 1)
    kinds = [Kind("f8", others=(n,), axes=(0,)) for n in (PLANES, 7, PLANES)]
    kept = [
        make_fields(node, case, kinds, in_window)
        for in_window in ([0, 0, 0], [1, 1, 1], [0, 0, 1], [1, 0, 0])
    ]
    with plan(node.comm, case, arrays(kept[0]), axes=(0,), node=node) as halo:
        assert halo.staging_nbytes < 100_000
        for step in range(20):
            new = make_fields(node, case, kinds)
            fields = (*kept, new)[(step // 2 + node.rank) % 5]
            put(fields, step)
            exchange_by(halo, *arrays(fields), halves=way != "exchange")
            check(fields, step)
            put(fields, 90)  # which nobody may see


@pytest.mark.parametrize("axis", [0, 1])
def test_places_that_follow_each_other_at_one_end_alone(compiled_node, axis):
    """Of a mesh: they are read there, where the field is in a window too, and put in their places.

    What follows each other at the receiver alone is packed.
    """
    node, n = compiled_node, 40_000
    left, right = beside(node)
    order = np.random.default_rng(3).permutation(n)
    together, scattered = np.arange(n), n + order
    shape = (3 * n, 2) if axis == 0 else (2, 3 * n)
    window = node.allocate_each(shape, float)
    names = [(together, scattered), (order, together + n)]
    for (sent, received), is_read in zip(names, (True, False), strict=True):
        sends, recvs = {right: sent}, {left: received}
        field = np.zeros(shape)
        ex = mpishare.NeighborExchange(node.comm, sends, recvs, field, axis=axis, node=node)
        assert (ex.staging_nbytes < 300_000) == is_read  # a buffer of 256 KiB, or twice 640 kB
        numbers = np.arange(2 * n, dtype=float).reshape(2, n).T
        for step, each in enumerate((field, window.array, np.zeros(shape)), 1):
            rows = each if axis == 0 else each.T
            rows[:n] = numbers + node.rank + 10 * step
            rows[n:] = -1
            ex.exchange(each)
            assert (rows[received] == numbers[sent] + left + 10 * step).all()
            assert (rows[2 * n :] == -1).all()
            assert (rows[:n] == numbers + node.rank + 10 * step).all()
        ex.close()
    window.close()


def test_what_is_accumulated_is_not_read_from_the_process(compiled_node):
    node = compiled_node
    field = np.zeros((4, PLANES))
    field[[0, -1]] = node.rank + 1
    with ring(node, field, axes=(0,)) as halo:
        before = halo.staging_nbytes
        halo.accumulate(field)
        assert before < 100_000 < halo.staging_nbytes
    low, high = (node.rank - 1) % node.size + 1, (node.rank + 1) % node.size + 1
    assert (field[1] == low).all()
    assert (field[2] == high).all()
    assert not field[[0, -1]].any()

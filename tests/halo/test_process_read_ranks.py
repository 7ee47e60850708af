"""Large faces of fields in private memory, which receivers read from the sender's process."""

from unittest import mock

import numpy as np
import pytest

import mpishare
from mpishare.plans.exchange.host import parts, process_read
from tests.helpers.halos import Case, Kind, arrays, check, even_case, make_fields, plan, put
from tests.helpers.rings import beside

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


def test_places_that_follow_each_other_at_one_end_alone(compiled_node):
    """Of a mesh: they are read there, through a buffer. Those at the receiver alone are packed."""
    node, n = compiled_node, 40_000
    left, right = beside(node)
    order, together = np.random.default_rng(3).permutation(n), np.arange(n)
    numbers = np.arange(2 * n, dtype=float).reshape(n, 2)
    for sent, received, is_read in ((together, n + order, True), (order, n + together, False)):
        field = np.concatenate([numbers + node.rank, 0 * numbers])
        ex = mpishare.NeighborExchange(node.comm, {right: sent}, {left: received}, field, node=node)
        assert (ex.staging_nbytes < 300_000) == is_read  # a buffer of 256 KiB, or twice 640 kB
        ex.exchange(field)
        assert (field[received] == numbers[sent] + left).all()
        assert (field[:n] == numbers + node.rank).all()
        ex.close()

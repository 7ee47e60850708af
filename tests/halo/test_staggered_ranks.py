"""Fields of one plan with blocks of their own: staggered ones, such as those of a C grid."""

import numpy as np
import pytest
from mpi4py import MPI

import mpishare
from mpishare import Box, Node, PeerError
from tests.helpers.halos import (
    accumulate_staggered,
    attempt,
    exchange_staggered,
    on_host,
    random_staggered,
    ring,
    same_error,
    some,
)

TWO = pytest.mark.ranks(min=2)


@pytest.fixture(params=["", "MPISHARE_HOST_CODE=python", "MPISHARE_ROUTE=mpi"])
def some_node(request, monkeypatch):
    """A node on each way that cells go on a host, or on the routes of its GPUs."""
    if request.param:
        monkeypatch.setenv(*request.param.split("="))
    with Node(timeout_s=40) as node:
        yield node


@pytest.mark.parametrize("part", range(3))
def test_random_plans(some_node, part):
    for seed in range(100 * part, 100 * part + some(some_node, 20)):
        exchange_staggered(some_node, some_node.comm, seed)


@pytest.mark.parametrize("part", range(2))
def test_random_sums(some_node, part):
    for seed in range(100 * part, 100 * part + some(some_node, 15)):
        accumulate_staggered(some_node, some_node.comm, seed, ("i4", "i8", "f4", "f8", "c16"))


def test_the_boxes_of_each_field(host_node):
    """The owned cells are the interior and the shell; each is of its own block."""
    for seed in range(20):
        halo, cases, fields = random_staggered(host_node, host_node.comm, seed, ("f8",), ("C",))
        with halo:
            for at, (case, field) in enumerate(zip(cases, fields, strict=True)):
                cells = halo.of(at)
                count = np.zeros(field.array.shape, int)
                for box in (cells.interior, *cells.shell):
                    count[box] += 1
                owned = np.zeros_like(count)
                owned[field.owned] = 1
                assert np.array_equal(count, owned)
                owned[cells.owned] -= 1
                assert not owned.any()
                assert cells.block.extents == case.extents[host_node.rank]
                coords = np.unravel_index(host_node.rank, case.dims)
                start = [sum(s[:c]) for s, c in zip(case.splits, coords, strict=True)]
                stop = [a + n for a, n in zip(start, cells.block.extents, strict=True)]
                assert cells.block.box == Box(tuple(start), tuple(stop))
            assert halo.block == halo.of(0).block


def number(x, y, shape):
    """The number of each cell of a periodic field, of walls too."""
    return 1000 * (x % shape[0])[:, None] + (y % shape[1])[None, :]


@pytest.mark.parametrize("wraps", [True, False])
def test_a_c_grid(node, wraps):
    """The face between two ranks is the upper one's; a wall's last face is the last rank's."""
    dims = MPI.Compute_dims(node.size, 2)
    coords = np.unravel_index(node.rank, dims)
    cells = (4, 3)
    fields, widths, rights = [], [], []
    for axis in (None, 0, 1):  # p, u, v
        faces = [int(axis == each) for each in range(2)]
        walls = [int(not wraps and coords[each] == dims[each] - 1) for each in range(2)]
        width = tuple((1, 1 + f - f * w) for f, w in zip(faces, walls, strict=True))
        shape = [n + 2 + f for n, f in zip(cells, faces, strict=True)]
        whole = [n * d + f * (not wraps) for n, d, f in zip(cells, dims, faces, strict=True)]
        places = [
            np.arange(n) + c * extent - 1 for n, c, extent in zip(shape, coords, cells, strict=True)
        ]
        right = number(*places, whole)
        if not wraps:
            for at, (each, n) in enumerate(zip(places, whole, strict=True)):
                np.moveaxis(right, at, 0)[(each < 0) | (each >= n)] = -1
        fields.append(node.xp.full(shape, -1))
        widths.append(width)
        rights.append(right)
    options = {"dims": dims, "periods": wraps, "corners": True, "node": node}
    with mpishare.HaloExchange(node.comm, fields, widths, **options) as halo:
        for at, field in enumerate(fields):
            box = halo.of(at).block.box
            owned = number(*map(np.arange, box.lower, box.upper), (10**6, 10**6))
            field[halo.of(at).owned] = node.xp.asarray(owned)
        halo.exchange(*fields)
        for field, right in zip(fields, rights, strict=True):
            assert np.array_equal(on_host(field), right)


def make(node, fields=None, width=((1, 1), (1, 2)), **options):
    fields = fields or [node.xp.zeros(5), node.xp.zeros(6)]
    return ring(node, fields, list(width) if isinstance(width, tuple) else width, **options)


@pytest.mark.parametrize("everywhere", [True, False], ids=["everywhere", "on one rank"])
def test_what_is_refused(node, everywhere):
    """And by which words."""
    is_mine = everywhere or node.rank == node.size - 1
    for wrong, words in (
        (
            {"width": 1},
            r"field 1 owns \(4,\) .* field 0 \(3,\).*width=\[1, \(1, 2\), \.\.\.\]",
        ),
        ({"width": [1, 1, 1]}, r"or a list of these for the 2 fields, not \[1, 1, 1\]"),
        ({"width": [(1, 1), None]}, "for the 2 fields"),
        ({"width": [(1, 1), (4, 3)]}, r"shape \(6,\) has 6 cells, fewer than its 4 \+ 3 ghosts"),
        ({"fields": mpishare.Layout.any(5), "width": [(1, 1), (1, 2)]}, "width must be"),
    ):
        error, told = attempt(node.comm, lambda wrong=wrong: make(node, **wrong if is_mine else {}))
        if "fields" in wrong and not everywhere and node.size > 1:
            continue  # some have a Layout alone
        assert isinstance(error, ValueError if is_mine else PeerError), told
        with pytest.raises(type(error), match=words):
            raise error
    with make(node) as halo:
        halo.exchange(node.xp.zeros(5), node.xp.zeros(6))


def test_a_field_whose_halo_is_too_wide_is_named(node):
    said = same_error(node.comm, lambda: make(node, width=((1, 1), (4, 1))))
    assert "field 1: width 4 along axis 0 of the cart is too large" in said
    assert "from_global_ids" in said


def test_boxes_of_all_fields_are_refused(node):
    """On every rank, if those of one rank differ."""
    last = node.rank == node.size - 1
    fields = [node.xp.zeros(5), node.xp.zeros(5 + last)]
    with make(node, fields, [(1, 1), (1, 1)]) as halo:
        for name in ("owned", "interior", "shell"):
            with pytest.raises(ValueError, match=rf"HaloExchange \d+: {name} failed: .*of\(0\)\."):
                getattr(halo, name)
        with pytest.raises(ValueError, match=r"shifted failed"):
            halo.shifted((slice(1, 2),), 0, 1)
        assert halo.of(1).shifted(halo.of(1).owned, 0, 1) == (slice(2, 5 + last),)
        with pytest.raises(ValueError, match=r"HaloExchange \d+: shifted failed: the box leaves"):
            halo.of(1).shifted(halo.of(1).owned, 0, 2)
        for wrong in (2, -1, 1.0, None, True):
            with pytest.raises(ValueError, match="of failed: the fields of the plan are 0 to 1"):
                halo.of(wrong)
    with make(node, [node.xp.zeros(5), node.xp.zeros(5)], [(1, 1), (1, 1)]) as halo:
        assert halo.owned == halo.of(1).owned == (slice(1, 4),)

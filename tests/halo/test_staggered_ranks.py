"""Fields of one plan with blocks of their own: staggered ones, such as those of a C grid."""

import numpy as np
import pytest

import mpishare
from mpishare import Box
from tests.helpers.halos import Drawn, arrays, check_refusals, same_error
from tests.helpers.rings import ring


def test_the_boxes_of_each_field(host_node):
    """The owned cells are the interior and the shell; each is of its own block."""
    comm = host_node.comm
    for seed in range(20):
        rng = np.random.default_rng([seed, comm.size, 23])
        drawn = Drawn.of(rng, comm.size, ("f8",), ("C",), share=1)
        fields = drawn.fields(host_node, comm.rank)
        with drawn.plan(comm, arrays(fields), node=host_node) as halo:
            for at, (case, field) in enumerate(zip(drawn.cases, fields, strict=True)):
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


def make(node, fields=None, width=((1, 1), (1, 2)), **options):
    fields = fields or [node.xp.zeros(5), node.xp.zeros(6)]
    return ring(node, fields, list(width) if isinstance(width, tuple) else width, **options)


@pytest.mark.parametrize("everywhere", [True, False], ids=["everywhere", "on one rank"])
def test_what_is_refused(node, everywhere):
    table = [
        ({"width": 1}, ValueError, "field 1 owns (4,) "),
        ({"width": 1}, ValueError, " field 0 (3,)"),
        ({"width": 1}, ValueError, "width=[1, (1, 2), ...]"),
        ({"width": [1, 1, 1]}, ValueError, "or a list of these for the 2 fields, not [1, 1, 1]"),
        ({"width": [(1, 1), None]}, ValueError, "for the 2 fields"),
        ({"width": [(1, 1), (4, 3)]}, ValueError, "(6,) has 6 cells, fewer than its 4 + 3 ghosts"),
    ]
    if everywhere:  # else some have a Layout alone
        any_fields = {"fields": mpishare.Layout.any(5), "width": [(1, 1), (1, 2)]}
        table.append((any_fields, ValueError, "width must be"))
    make_plan = lambda given: make(node, **given)  # noqa: E731
    check_refusals(node.comm, make_plan, {}, table, everywhere=everywhere)
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

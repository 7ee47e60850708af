"""Sums that are given back: the bits of `accumulate` and `exchange` after it, by one call."""

import numpy as np
import pytest

from mpishare import HaloExchange, Layout, NeighborExchange, Seam, SeamExchange, UnsupportedError
from tests.helpers.captures import engines_of
from tests.helpers.halos import (
    FORMS,
    HOST_FORMS,
    Kind,
    arrays,
    even_case,
    exchange_step,
    exchanging,
    make_fields,
    on_host,
    pause,
    random_case,
    random_kinds,
    some,
)
from tests.helpers.seams import RandomSeams, expected

DTYPES = ("i4", "i8", "f4", "f8", "c8", "c16")


def fill(node, fields, seed):
    """Numbers whose sums depend on their order."""
    rng = np.random.default_rng([seed, node.rank, 43])
    for field in fields:
        values = rng.standard_normal(field.shape) * 10.0 ** rng.integers(-3, 6, field.shape)
        field[...] = node.xp.asarray(values.astype(field.dtype))


def bits_of(fields):
    return [on_host(each).tobytes() for each in fields]


def check_steps(node, plan, fields, seed, others=()):
    """In turns with the calls that it stands for, on the same plan, also for other arrays."""
    mine = np.random.default_rng([seed, node.rank, 47])
    for step in range(4):
        now = others if step == 2 and others else fields
        fill(node, now, seed + step)
        plan.accumulate(*now)
        plan.exchange(*now)
        right = bits_of(now)
        fill(node, now, seed + step)
        pause(mine)
        plan.accumulate(*now, give_back=True)
        assert bits_of(now) == right, f"seed {seed}, step {step}: {plan}"


@pytest.mark.parametrize("part", range(4))
def test_random_plans(node, route, part):
    for seed in range(6 * part, 6 * part + some(node, 6)):
        rng = np.random.default_rng([seed, node.size, 53])
        case = random_case(rng, node.size)
        forms = HOST_FORMS if node.backend == "host" else FORMS
        kinds, axes = random_kinds(rng, case.naxes, DTYPES, forms)
        others = arrays(make_fields(node, case, kinds))
        with exchanging(node, case, kinds, False, axes=axes) as (halo, fields):
            check_steps(node, halo, arrays(fields), seed, others)


def test_slabs_large_and_small(node, every_route):
    """Where each cell has one copy at most; by pieces and chunks, on all routes."""
    for count in (1, 300, 40_000):
        u = node.xp.zeros((6, count))
        with HaloExchange(node.comm, u, 1, dims=(node.size,), axes=0, node=node) as halo:
            check_steps(node, halo, [u], count)


def test_what_two_ranks_have_takes_one_round(host_node):
    """Without an engine that adds for itself, or a wait for the sums."""
    u = np.zeros((6, 5))
    with HaloExchange(host_node.comm, u, 1, dims=(host_node.size,), axes=0, node=host_node) as halo:
        halo.accumulate(u, give_back=True)
        assert len(engines_of(halo)) == 1
    u = np.zeros((6, 80_000))  # so many take less time in two, in which the sums are read in place
    with HaloExchange(
        host_node.comm, u, 1, dims=(host_node.size,), axes=0, periods=True, node=host_node
    ) as halo:
        check_steps(host_node, halo, [u], 7)
        assert len(engines_of(halo)) == 2


def test_points_that_any_number_of_ranks_share(node, every_route):
    """Spectral elements: what every rank adds to a point is the same number everywhere."""
    ids = np.concatenate([[node.size * 10 + node.rank], np.arange(3)])
    n_owned = 4 if node.rank == 0 else 1
    if node.rank == 0:
        ids = np.concatenate([np.arange(3), [node.size * 10]])
    rng = np.random.default_rng([node.rank, 59])
    values = rng.standard_normal(4) * 10.0 ** rng.integers(-6, 7, 4)
    u, at = node.xp.array(values), np.flatnonzero(ids < 3)
    with NeighborExchange.from_global_ids(node.comm, ids, n_owned, u, node=node) as plan:
        plan.accumulate(u, give_back=True)
        found = node.comm.allgather(on_host(u)[at].tobytes())
        each = node.comm.allgather(values[at])
    total = each[0].copy()
    for other in each[1:]:
        total += other
    assert set(found) == {total.tobytes()}


@pytest.mark.parametrize("part", range(3))
def test_random_seams(node, every_route, part):
    """Turned, scaled, with offsets, and along rings by new shifts."""
    for seed in range(8 * part, 8 * part + some(node, 8)):
        case = RandomSeams(seed, node.size, ("f8", "f4", "c16", "i4"))
        rng = np.random.default_rng([seed, node.rank])
        specs, seams = case.fields[node.rank], case.seams[node.rank]
        fields = [spec.make(node.xp, rng) for spec in specs]
        with SeamExchange(node.comm, fields, seams, node=node) as plan:
            for step in range(3):
                shift = case.shift()
                sums = expected(node.comm, [*map(on_host, fields)], seams, shift, adds=True)
                right = expected(node.comm, sums, seams, shift)
                plan.accumulate(*fields, shift=shift, give_back=True)
                for number, each in enumerate(fields):
                    assert np.array_equal(on_host(each), right[number]), (seed, step, number, seams)


def test_rounded_on_the_way(node, route):
    """Ghosts have the sum as it travels."""
    u = node.xp.zeros((6, 5))
    with HaloExchange(
        node.comm, u, 1, dims=(node.size,), axes=0, periods=True, node=node, wire="float32"
    ) as halo:
        check_steps(node, halo, [u], 3)


def test_any_fields(node):
    case = {"dims": (node.size,), "axes": 0, "periods": True, "node": node}
    with HaloExchange(node.comm, Layout.any(6), 1, **case) as halo:
        for shape, dtype in (((6,), "f4"), ((6, 3), "f8"), ((6,), "f4")):
            u = node.xp.zeros(shape, dtype)
            check_steps(node, halo, [u], 5)


def test_what_is_refused_changes_nothing(host_node, route):
    case = even_case((host_node.size,), True, 3)
    with exchanging(host_node, case, [Kind("f8"), Kind("?")]) as (halo, fields):
        with pytest.raises((TypeError, UnsupportedError), match="add"):
            halo.accumulate(*arrays(fields), give_back=True)
        exchange_step(halo, fields, 1)
    u, peer = np.arange(4.0), (host_node.rank + 1) % host_node.size
    with SeamExchange(
        host_node.comm, u, [Seam((0, np.s_[:1]), (peer, 0, np.s_[3:]))], node=host_node
    ) as plan:
        plan.accumulate(u, give_back=True)
        with pytest.raises(ValueError, match="accumulate failed"):
            plan.accumulate(np.zeros(5), give_back=True)
        plan.accumulate(u, give_back=True)
    assert u.tolist() == [6, 1, 2, 6]

"""Accumulate, the reverse: every ghost is added to the cell that it shadows, then zeroed.

With `give_back` ghosts get the sums: the bits of `accumulate`, and of `exchange` after it.
"""

import numpy as np
import pytest

from mpishare import Layout, NeighborExchange, UnsupportedError
from tests.helpers.captures import engines_of
from tests.helpers.halos import (
    Kind,
    arrays,
    check_given_back,
    check_sums,
    even_case,
    exchange_step,
    exchanging,
    on_host,
    put_weights,
    random_sums,
    some,
)
from tests.helpers.rings import ring


@pytest.mark.parametrize("part", range(4))
def test_random_plans(node, every_route, part):
    """Ghosts that have an owner are zeroed, the others stay. All dtypes and orders in memory."""
    for seed in range(13 * part, 13 * part + some(node, 13)):
        random_sums(node, node.comm, seed, gives_back=seed % 2 == 1)


def test_corners_and_wide_halos(node, every_route):
    """Cells that are shadowed many times: on both sides, by oneself, in corners."""
    case = even_case((1, node.size), True, 2, 2, corners=True)
    kinds = [Kind("f8"), Kind("f4", "F"), Kind("i4", "strided"), Kind("c16")]
    with exchanging(node, case, kinds) as (halo, fields):
        put_weights(fields, 0)
        halo.accumulate(*arrays(fields))
        check_sums(fields, 0)


@pytest.mark.parametrize("dtype", ["f8", "c8", "f4"])
def test_all_routes_add_large_and_small_faces_in_one_order(node, monkeypatch, dtype):
    """Faces in many chunks, with edges that belong to several."""
    shape, rng = (6, 30004), np.random.default_rng([node.rank, 41])
    given = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)
    bits = set()
    for route in (None, "copy", "pinned") if node.backend == "cuda" else (None, "mpi"):
        if route is not None:
            monkeypatch.setenv("MPISHARE_ROUTE", route)
        u = node.xp.asarray(given.astype(dtype))
        with ring(node, u, 2, dims=(node.size, 1), corners=True) as halo:
            halo.accumulate(u)
        bits.add(on_host(u).tobytes())
    assert len(bits) == 1


def test_what_cannot_be_added(host_node, route):
    """Refused; the exchange goes on."""
    case = even_case((host_node.size,), True, 3)
    for dtype in ("?", "f8,i4", "V3", "S7", "M8[us]"):
        with exchanging(host_node, case, [Kind("f8"), Kind(dtype)]) as (halo, fields):
            for options in ({}, {"give_back": True}):
                with pytest.raises((TypeError, UnsupportedError), match="add"):
                    halo.accumulate(*arrays(fields), **options)
            exchange_step(halo, fields, 1)


def test_slabs_large_and_small_given_back(node, every_route):
    """Where each cell has one copy at most; by pieces and chunks, on all routes."""
    for count in (1, 300, 40_000):
        u = node.xp.zeros((6, count))
        with ring(node, u, axes=0, periods=False) as halo:
            check_given_back(node, halo, [u], count)


def test_what_two_ranks_have_takes_one_round(host_node):
    """By an engine of its own, beside the one that adds alone, and no wait for the sums."""
    u = np.zeros((6, 5))
    with ring(host_node, u, axes=0, periods=False) as halo:
        halo.accumulate(u, give_back=True)
        halo.accumulate(u)
        assert len(engines_of(halo)) == 3
    u = np.zeros((6, 80_000))  # so many take less time in two, in which the sums are read in place
    with ring(host_node, u, axes=0) as halo:
        check_given_back(host_node, halo, [u], 7)
        halo.accumulate(u)
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


def test_given_back_rounded_on_the_way(node, route):
    """Ghosts have the sum as it travels."""
    u = node.xp.zeros((6, 5))
    with ring(node, u, axes=0, wire="float32") as halo:
        check_given_back(node, halo, [u], 3)


def test_any_fields_given_back(node):
    with ring(node, Layout.any(6), axes=0) as halo:
        for shape, dtype in (((6,), "f4"), ((6, 3), "f8"), ((6,), "f4")):
            u = node.xp.zeros(shape, dtype)
            check_given_back(node, halo, [u], 5)

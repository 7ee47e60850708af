"""Plans on more ranks than the other tests have."""

import gc

import numpy as np
import pytest

import mpishare
from tests.helpers.reporting import report
from tests.helpers.scenes import play
from tests.helpers.stage import Stage, leftovers


def many_ranks(stage: Stage, seeds: int) -> None:
    from tests.helpers.halos import (
        Kind,
        arrays,
        even_case,
        exchange_step,
        make_fields,
        plan,
        random_plan,
    )

    with stage.node() as node:
        for seed in range(seeds):
            random_plan(node, stage.world, seed)
        cube = even_case((2, 2, stage.size // 4), True, 3, 2, corners=True)
        if cube.size == stage.size:
            fields = make_fields(node, cube, stage.rank, [Kind()], [True])
            with plan(stage.world, cube, arrays(fields), node=node) as halo:
                for step in range(10):
                    exchange_step(halo, fields, step)
    report({"done": True})


def test_random_plans():
    """On six ranks test_nodes_faults has some."""
    played = play(8, many_ranks, 8)
    played.ended_well()
    assert sorted(played.result.reports) == list(range(8))


def left_open(stage: Stage, is_given: bool) -> None:
    cart = stage.world.Create_cart((stage.size,), (True,))
    node = stage.node() if is_given else None
    fields = node.allocate_each(6).array if is_given else np.zeros(6)
    halo = mpishare.HaloExchange(cart, fields, 1, node=node)
    halo.exchange()
    ex = mpishare.NeighborExchange(stage.world, {stage.rank: [1]}, {stage.rank: [2]}, fields)
    ex.start()
    report({"done": True})


@pytest.mark.parametrize("is_given", [True, False], ids=["node given", "node kept"])
def test_a_program_that_closes_nothing(is_given):
    """It ends with status 0, and says nothing."""
    played = play(2, left_open, is_given)
    played.ended_well()
    assert all(played.rank(rank)["done"] for rank in range(2))


def freed(stage: Stage) -> None:
    def go() -> None:
        cart = stage.world.Create_cart((stage.size,), (True,))
        for _ in range(2):
            with mpishare.HaloExchange(cart, np.zeros(6), 1) as halo:
                halo.exchange()
        cart.Free()

    go()
    gc.collect()
    report({"once": leftovers()})
    for _ in range(5):
        go()
    gc.collect()
    report({"often": leftovers()})


def test_nodes_kept_on_carts_that_are_freed():
    """They go with their communicators, and do not pile up."""
    played = play(2, freed)
    played.ended_well()
    for rank in range(2):
        facts = played.rank(rank)
        assert len(facts["often"]) <= len(facts["once"]), facts

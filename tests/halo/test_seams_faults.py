"""Seams over several nodes, as the launcher of MPICH pretends them."""

import pytest

from tests.helpers.scenes_halo import play_on
from tests.helpers.stage import Stage


def lists_on_nodes(stage: Stage, seeds: int) -> None:
    from tests.helpers.seams import check_list

    seen = set()
    with stage.node() as node:
        for seed in range(seeds):
            # Of whole numbers: sums of other nodes come behind those of one's own.
            seen |= {*check_list(node, stage.world, seed, ("i4", "c16", "i8")).values()}
    assert {"host", "mpi"} <= seen


@pytest.mark.parametrize("nodes", ["2 + 2", "2 + 1 + 1"])
def test_random_lists(nodes):
    play_on(nodes, lists_on_nodes, 12, shared=True).ended_well()

"""Seams over several nodes, as the launcher of MPICH pretends them, and a rank that is late."""

import time

import numpy as np
import pytest

from tests.helpers.scenes import play
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


def late(stage: Stage, missing: int) -> None:
    from mpishare import Seam, SeamExchange

    stage.quiet()
    node = stage.node(timeout_s=2.0)
    u = np.zeros(4)
    ring = [(rank, 0, np.s_[1:]) for rank in range(stage.size)]
    seams = [Seam((0, np.s_[:1]), ring, along=0, shift="n")]
    plan = SeamExchange(stage.world, u, seams, node=node)
    if stage.rank == missing:
        time.sleep(4.0)
    else:
        stage.attempt("call", lambda: plan.exchange(u, shift={"n": 1}))
    stage.attempt("close", node.close)


def test_a_rank_that_does_not_come_within_the_deadline():
    """Also the owner of a piece that nothing is read from at this shift."""
    played = play(3, late, 1)
    for rank in (0, 2):
        told = played.raised(rank, "call", "PeerTimeout")
        assert "rank 1" in told.text
        assert "exchange" in told.text

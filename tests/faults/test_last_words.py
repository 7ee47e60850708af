"""A job that is aborted says why: nothing of it is cut off, and nobody is blamed for another."""

import re
import sys

import pytest

from tests.faults.scenes import play
from tests.faults.stage import Stage
from tests.helpers.launch import run_ranks

LATE = """
import time
import mpishare
from mpi4py import MPI

with mpishare.Node(timeout_s=0.5) as node:
    if node.rank == 1:
        time.sleep(2.5)
    node.barrier()
"""


@pytest.mark.parametrize("again", range(3))  # without the wait before the abort one in five fails
def test_every_rank_says_why_it_aborts(again):
    result = run_ranks(4, LATE)
    assert result.returncode != 0
    for rank in (0, 2, 3):
        said = re.search(f"mpishare: rank {rank} aborts the job: .*", result.stderr)
        assert said, result.describe()
        assert "Node.barrier failed: rank 1 did not arrive" in said[0]


def test_an_abort_waits_for_a_rank_that_says_nothing_no_longer_than_a_second():
    result = run_ranks(2, LATE.replace("2.5", "60"))
    assert "mpishare: rank 0 aborts the job: Node.barrier" in result.stderr
    assert result.seconds < 20


def unclosed(stage: Stage) -> None:
    import numpy as np

    node = stage.node()
    cart = stage.world.Create_cart((stage.size,), (True,))
    halo = mpishare.HaloExchange(cart, np.zeros(6), 1, node=node)  # noqa: F821  of the scene
    halo.exchange()
    if stage.rank == 1:
        sys.exit(0)

    def forever() -> None:
        while True:
            halo.exchange()

    if stage.rank == 3:
        # Its neighbors 0 and 2 have left because of rank 1 by the time it looks.
        time.sleep(1.5)  # noqa: F821
    stage.attempt("call", forever)


def test_who_exits_because_of_another_is_not_blamed():
    played = play(4, unclosed)
    for rank in (0, 2, 3):
        told = played.raised(rank, "call", "PeerError")
        assert told.failures == {1: "exited without closing the node"}, played.describe()

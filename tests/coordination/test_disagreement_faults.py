"""Ranks that do different things are told of each other: in waits, at the end, and in plans."""

import functools

import numpy as np
import pytest

import mpishare
from tests.helpers.scenes import play
from tests.helpers.stage import Stage

LIMIT_S = 3.0


def meet(stage: Stage, calls: list[str]) -> None:
    node = stage.node()
    window = node.allocate(4, fill=0.0)
    event = node.event()
    made = {
        "allocate": lambda: node.allocate(4),
        "barrier": node.barrier,
        "fence": window.fence,
        "event.wait": event.wait,
        "start": lambda: window.start([(stage.rank + 1) % stage.size]),
    }
    node.barrier()
    errors = mpishare.MismatchError, mpishare.PeerError
    told = stage.raises(errors, made[calls[stage.rank % len(calls)]], within_s=3)
    if type(told) is mpishare.PeerError:  # told by the rank that saw it first
        words = "MismatchError: ranks wait for each other"
        assert words in " ".join(told.failures.values())
    assert told.failures
    assert mpishare.MismatchError in stage.gather(type(told))
    node.close()
    stage.use_another_node()


@pytest.mark.parametrize(
    "calls",
    [
        ["fence", "allocate", "allocate"],
        ["fence", "barrier"],
        ["barrier", "event.wait", "barrier"],
        ["start"],
    ],
    ids=" meets ".join,
)
def test_waits_that_lead_in_a_circle_are_seen(calls):
    play(3, meet, calls, shared=True).ended_well()


def remade(stage: Stage, call: str) -> None:
    """A program with a plan for each shape of its blocks, where one rank has not seen its shape."""
    u = np.zeros((6, 4))
    plan = functools.partial(mpishare.HaloExchange, stage.world, dims=(3, 1), periods=True)
    halo = plan(u, 1)
    halo.exchange()
    made = {"HaloExchange": lambda: plan(np.zeros((6, 5)), 1), "Node": stage.node}
    stage.attempt("call", halo.exchange if stage.rank == 1 else made[call])


@pytest.mark.parametrize("call", ["HaloExchange", "Node"])
def test_what_is_made_where_another_rank_exchanges(call):
    """Neither is made on the node on which the other rank waits: that is the first plan's own."""
    played = play(3, remade, call)
    told = [played.told(rank, "call") for rank in range(3)]
    assert any(each.error == "MismatchError" for each in told), played.describe()
    for each in told:
        assert each.error in ("MismatchError", "PeerError"), played.describe()
        assert "rank 1 in HaloExchange 1: exchange" in each.text, played.describe()
        assert f"rank 0 in {call}" in each.text, played.describe()
        assert each.seconds < LIMIT_S

"""Ranks that do different things are told of each other: in waits, at the end, and in plans."""

import functools
import time

import numpy as np
import pytest

import mpishare
from tests.helpers.scenes import Played, Told, play
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


def told_of_a_circle(played: Played) -> list[Told]:
    """What three ranks were told of it, each in time: one saw it, and may have told the others."""
    told = [played.told(rank, "call") for rank in range(3)]
    assert any(each.error == "MismatchError" for each in told), played.describe()
    for each in told:
        assert each.error in ("MismatchError", "PeerError"), played.describe()
        assert each.seconds < LIMIT_S
    return told


@pytest.mark.parametrize("call", ["HaloExchange", "Node"])
def test_what_is_made_where_another_rank_exchanges(call):
    """Neither is made on the node on which the other rank waits: that is the first plan's own."""
    played = play(3, remade, call)
    for each in told_of_a_circle(played):
        assert "rank 1 in HaloExchange 1: exchange" in each.text, played.describe()
        assert f"rank 0 in {call}" in each.text, played.describe()


def crosswise(stage: Stage, calls: list[str]) -> None:
    """Of each node some ranks wait there, and the others in a call of another node."""
    one, two, apart = stage.node(), stage.node(), stage.world.Dup()
    u = np.zeros((6, 4))
    plan = functools.partial(mpishare.HaloExchange, stage.world, u, 1, dims=(3, 1), periods=True)
    kept = plan()  # on a node of its own
    made = {
        "one": one.barrier,
        "two": lambda: two.allocate(4),
        "kept": lambda: kept.exchange(u),
        "plan of one": lambda: plan(node=one),
        "plan of two": lambda: plan(node=two),
        "plan": plan,
    }
    stage.attempt("call", made[calls[stage.rank]])
    apart.Barrier()  # else the job may be aborted before all have told


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (["one", "two", "one"], "rank 1 in Node.allocate"),
        (["two", "one", "kept"], "rank 2 in HaloExchange 1: exchange"),
        (["plan of one", "plan of one", "plan of two"], "HaloExchange of another node"),
        (["plan of one", "plan", "plan of one"], "rank 1 in HaloExchange without node="),
    ],
    ids=lambda given: " meets ".join(given) if isinstance(given, list) else "",
)
def test_waits_of_several_nodes_that_lead_in_a_circle_are_seen(calls, words):
    played = play(3, crosswise, calls)
    told = told_of_a_circle(played)
    for each in told:
        assert "ranks wait for each other" in each.text, played.describe()
    assert any(words in each.text for each in told), played.describe()


def in_turn(stage: Stage) -> None:
    """Ranks that are late come to one node after the other: nobody waits for a rank that waits."""
    one, two = stage.node(), stage.node()
    halves = stage.world.Split(stage.rank // 2)
    pair = stage.node(halves)
    for late in range(3):
        if stage.rank == late:
            time.sleep(1.7)
        for node in (two, one, pair)[late:] + (two, one, pair)[:late]:
            node.barrier()
    stage.attempt("call", lambda: None)


def test_control_a_late_rank_of_several_nodes_is_awaited():
    play(3, in_turn).ended_well()

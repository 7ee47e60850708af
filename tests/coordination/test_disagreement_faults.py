"""Ranks that do different things, or the same with other arguments, are told of each other."""

import functools

import numpy as np
import pytest

import mpishare
from tests.helpers.reporting import report
from tests.helpers.scenes import BACKENDS, play
from tests.helpers.stage import Stage, leftovers, shared_bytes

LIMIT_S = 3.0


def meet(stage: Stage, calls: list[str]) -> None:
    node = stage.node()
    window = node.allocate(4, fill=0.0)
    event = node.event()
    made = {
        "allocate": lambda: node.allocate(4),
        "allocate_each": lambda: node.allocate_each(4),
        "share": lambda: node.share([1.0, 2.0]),
        "event": node.event,
        "barrier": node.barrier,
        "close window": window.close,
        "close": node.close,
        "fence": window.fence,
        "event.wait": event.wait,
        "start": lambda: window.start([(stage.rank + 1) % stage.size]),
        "bad shape": lambda: node.allocate(-1 if stage.rank == 1 else 4),
    }
    node.barrier()
    stage.attempt("call", made[calls[stage.rank % len(calls)]])
    if calls[0] in ("fence", "event.wait", "start"):
        stage.attempt("then", node.barrier)
    else:
        stage.attempt("go on", lambda: node.allocate(4, fill=1.0).fence())
    stage.attempt("end", node.close)
    stage.second_node(stage.world)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "calls",
    [
        ["allocate", "event"],
        ["barrier", "share", "allocate_each"],
        ["close window", "barrier"],
    ],
    ids=" meets ".join,
)
def test_different_collective_calls_are_named_to_all(calls, backend):
    played = play(3, meet, calls, backend=backend, shared=True)
    spoken = {"event": "Node.event", "barrier": "Node.barrier", "share": "Node.share"}
    for rank in range(3):
        told = played.raised(rank, "call", "MismatchError")
        assert told.seconds < LIMIT_S
        mine = calls[rank % len(calls)]
        different = [r for r in range(3) if calls[r % len(calls)] != mine]
        assert sorted(told.failures) == different
        for other in different:
            assert spoken.get(calls[other % len(calls)], "") in told.failures[other]
    played.worked(range(3), "second node")


def test_a_rank_that_closes_where_others_go_on_has_left():
    played = play(3, meet, ["barrier", "barrier", "close"], shared=True)
    for rank in range(3):
        played.raised(rank, "call", "MismatchError")
    played.raised(2, "go on", "ClosedError")
    for rank in (0, 1):
        told = played.raised(rank, "go on", "PeerError")
        assert list(told.failures) == [2]
        assert told.seconds < LIMIT_S
    played.worked(range(3), "end", "second node")
    played.ended_well()


ARGUMENTS = (
    *("shape", "dtype", "fill", "owner"),
    *("each dtype", "share owner", "event owner", "waiters"),
)


def differ(stage: Stage, names: tuple[str, ...]) -> None:
    node = stage.node()
    rank, last = stage.rank, float(stage.rank == 2)
    dtype = ["f4", "f8", "f8"][rank]
    made = {
        "shape": lambda: node.allocate(4 + rank),
        "dtype": lambda: node.allocate(4, dtype=dtype),
        "fill": lambda: node.allocate(4, fill=last),
        "owner": lambda: node.allocate(4, owner=rank),
        "each dtype": lambda: node.allocate_each(4, dtype=dtype),
        "share owner": lambda: node.share([1.0], owner=rank),
        "event owner": lambda: node.event(owner=rank),
        "waiters": lambda: node.event(waiters=[1] if rank else [1, 2]),
    }
    before = shared_bytes()
    for name in names:
        stage.attempt(name, made[name])
    report({"kept bytes": shared_bytes() - before})
    stage.attempt("go on", lambda: node.allocate(4, fill=1.0).fence())
    stage.attempt("end", node.close)
    stage.second_node(stage.world)
    report({"leftovers": leftovers()})


@pytest.mark.parametrize("backend", BACKENDS)
def test_different_arguments_are_named_to_all(backend):
    played = play(3, differ, ARGUMENTS, backend=backend, shared=True)
    for rank in range(3):
        for name in ARGUMENTS:
            told = played.raised(rank, name, "MismatchError")
            assert told.failures, played.describe()
            assert rank not in told.failures
        assert played.rank(rank)["kept bytes"] == 0
        assert played.rank(rank)["leftovers"] == []
    played.worked(range(3), "go on", "end", "second node")
    played.ended_well()


def test_a_bad_argument_of_one_rank_is_its_own_error_and_the_others_peer_error():
    played = play(3, meet, ["bad shape"], shared=True)
    played.raised(1, "call", "ValueError")
    for rank in (0, 2):
        told = played.raised(rank, "call", "PeerError")
        assert list(told.failures) == [1]
        assert told.failures[1].startswith("ValueError: ")
    played.worked(range(3), "go on", "end", "second node")
    played.ended_well()


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
    played = play(3, meet, calls, shared=True)
    errors = []
    for rank in range(3):
        told = played.told(rank, "call")
        assert told.seconds < LIMIT_S, played.describe()
        if told.error == "PeerError":  # told by the rank that saw it first
            assert "MismatchError: ranks wait for each other" in " ".join(told.failures.values())
        else:
            assert told.error == "MismatchError", played.describe()
            assert told.failures
        errors.append(told.error)
    assert "MismatchError" in errors
    played.worked(range(3), "end", "second node")
    played.ended_well()


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

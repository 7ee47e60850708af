"""Ranks that do different things are told of each other: in waits, at the end, and in plans."""

import time

import pytest

import mpishare
from tests.helpers.scenes import play
from tests.helpers.stage import Stage


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
    told = stage.raises(errors, made[calls[stage.rank % len(calls)]])
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
        ["barrier", "allocate", "allocate"],
        ["barrier", "event.wait", "barrier"],
        ["start"],
    ],
    ids=" meets ".join,
)
def test_waits_that_lead_in_a_circle_are_seen(calls):
    play(3, meet, calls, shared=True).ended_well()


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


def exchange(stage: Stage, is_one_call: bool) -> None:
    """Wait for messages of each other, in the calls of one plan for 1.5 s, or of two."""
    from mpishare.coordination.waits import WaitMonitor
    from mpishare.plans.node_cache import context_of

    agreement = context_of(stage.node()).agreement
    call = f"HaloExchange {1 if is_one_call else stage.rank}: wait"
    peers = [1 - stage.rank]
    with WaitMonitor(agreement, call, lambda: peers, agreement.check_whole, moves=True) as monitor:
        if is_one_call:
            end = time.monotonic() + 1.5
            assert monitor.poll(lambda: time.monotonic() > end)
        else:
            errors = mpishare.MismatchError, mpishare.PeerError
            stage.raises(errors, lambda: monitor.poll(lambda: False))
    stage.end()


@pytest.mark.parametrize("is_one_call", [True, False])
def test_long_messages_of_one_call_are_no_circle(is_one_call):
    play(2, exchange, is_one_call).ended_well()


def mix(stage: Stage, one: str, other: str) -> None:
    """Two calls of one plan meet, each of which was made by all ranks before."""
    import os

    import numpy as np

    os.environ["MPISHARE_ROUTE"] = "mpi"
    stage.quiet()
    u = np.zeros(4)
    halo = mpishare.HaloExchange(
        stage.world, u, 1, dims=(2,), periods=True, node=stage.node(), backend="host"
    )
    calls = {
        "exchange": lambda: halo.exchange(u),
        "accumulate": lambda: halo.accumulate(u),
        "give_back": lambda: halo.accumulate(u, give_back=True),
    }
    for name in (one, other)[: 2 * (one == "exchange")]:  # else it is the first call
        calls[name]()
    errors = mpishare.MismatchError, mpishare.PeerError
    told = stage.raises(errors, calls[other if stage.rank else one])
    assert one in str(told)
    assert other in str(told)
    stage.end()


@pytest.mark.parametrize(
    ("one", "other"), [("exchange", "accumulate"), ("give_back", "accumulate")]
)
def test_calls_of_one_plan_do_not_take_each_others_messages(one, other):
    play(2, mix, one, other).ended()

"""A call that one rank alone refuses: the others, who are in it, are told where and why."""

import numpy as np
import pytest

import mpishare
from tests.helpers.scenes import play
from tests.helpers.stage import Stage


def refused_by_rank_0(stage: Stage, what: str, then: str) -> None:
    """Rank 0 catches its error and goes on, into a barrier or into no call of mpishare."""
    node = stage.node(timeout_s=2.0)
    right, wrong = np.zeros((2, 4)), np.zeros((2, 3))
    if what == "plan":

        def call(comm: object) -> object:
            return mpishare.Allreduce(comm, right, node=node)

        given = "no communicator" if stage.rank == 0 else stage.world
    else:
        plans = {
            "sum": lambda: mpishare.Allreduce(node.comm, right, node=node).reduce,
            "halo": lambda: stage.ring(node, right, axes=1).exchange,
            "redistribution": lambda: (
                mpishare.Redistribute(node.comm, (2 * node.size, 4), 0, None, node=node).forward
            ),
        }
        call, given = plans[what](), wrong if stage.rank == 0 else right
    if stage.rank == 0:
        stage.raises((TypeError, ValueError), call, given)
        if then == "barrier":
            stage.attempt("call", node.barrier)
        else:
            stage.world.recv(source=1)
    else:
        stage.attempt("call", call, given)
        if stage.rank == 1 and then != "barrier":
            stage.world.send(None, 0)


@pytest.mark.parametrize("then", ["barrier", "nothing"])
@pytest.mark.parametrize("what", ["plan", "sum", "halo", "redistribution"])
def test_those_who_wait_hear_who_refused_the_call_and_why(what, then):
    played = play(3, refused_by_rank_0, what, then, survivable=True)
    ranks = (1, 2) if then == "nothing" else (0, 1, 2)
    for rank in ranks:
        told = played.told(rank, "call")
        assert told.error in ("MismatchError", "PeerError", "PeerTimeout"), played.describe()
        assert "rank 0 has refused a call (" in told.text, played.describe()
        why = "comm must be an Intracomm" if what == "plan" else r"shape (2, 3) instead of (2, 4)"
        assert why in told.text, played.describe()
        assert "ranks wait for each other" not in told.text

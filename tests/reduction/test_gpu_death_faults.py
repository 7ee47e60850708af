"""A rank is killed, or does not come, while kernels of a reduction wait for it: it is named."""

import os

import pytest

import mpishare
from tests.helpers.scenes import play
from tests.helpers.stage import Stage

CALLS = ("small", "large", "dot", "replay")
# What the plan chooses, and kernels that wait where ranks take turns of a GPU, too.
ROUTES = ("", "fused")


def missed(stage: Stage, call: str, route: str, is_killed: bool) -> None:
    import cupy

    if route:
        os.environ["MPISHARE_ROUTE"] = route
    stage.quiet()
    node = stage.node(timeout_s=60.0 if is_killed else 3.0)
    x = cupy.zeros(100 if call != "large" else 1 << 20)
    out, stream = cupy.zeros(()), cupy.cuda.Stream(non_blocking=True)
    total = mpishare.Allreduce(stage.world, x, node=node)
    with stream:
        for _ in range(3):
            total.reduce(x)
            total.dot(x, x, out=out)
        calls = {
            "small": lambda: total.reduce(x),
            "large": lambda: total.reduce(x),
            "dot": lambda: total.dot(x, x, out=out),
            "replay": lambda: total.reduce(x),
        }
        if not node.report().time_sliced_gpus or route == "fused":
            stream.begin_capture()
            total.reduce(x)
            calls["replay"] = stream.end_capture().launch
        node.synchronize()
        node.barrier()
        if not stage.is_missing(dies=is_killed):
            # Twice: what is enqueued behind the first must end, too.
            stage.attempt("first", lambda: (calls[call](), calls[call](), node.synchronize()))
            stage.attempt("then", lambda: total.reduce(x))
            stage.attempt("close", node.close)
    stage.end()


@pytest.mark.gpu
@pytest.mark.kills
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("call", CALLS)
def test_all_survivors_name_the_killed_rank(call, route):
    played = play(3, missed, call, route, True, survivable=True, backend="cuda")
    played.survivors_name(1, of=(0, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS[:3])
def test_a_rank_that_does_not_come_is_named_at_the_deadline(call):
    played = play(3, missed, call, "", False, survivable=True, backend="cuda")
    played.others_give_up()
    assert all(played.told(rank, "first").seconds > 2.5 for rank in (0, 2))

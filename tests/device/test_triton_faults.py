"""A rank does not come while kernels of Triton wait for it: it is named, and the kernels end."""

import time

import pytest

from tests.helpers.scenes import LIMIT_S, play
from tests.helpers.stage import Stage

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("torch", reason="PyTorch is not installed")


def missed(stage: Stage, kind: str) -> None:
    import torch
    import triton
    import triton.language as tl

    from mpishare.device import triton as device
    from tests.helpers.reporting import report

    node = stage.node(timeout_s=3.0)
    window = node.allocate_each(8, signals=4)

    @triton.jit
    def hang(d, peer, ended, kind: tl.constexpr):
        if kind == "wait":
            ok = device.wait(d, peer, 1, 1)
        elif kind == "barrier":
            ok = device.barrier(d, 2)
        else:
            ok, _ = device.get_word(d, peer, 3, 1, tl.float32)
        tl.store(ended, tl.where(ok, 2, 1))

    ended = torch.zeros(1, dtype=torch.int32, device="cuda")
    if stage.rank == 1:
        time.sleep(20)  # until the other aborts the job
    for _ in range(2):  # what is enqueued behind the first must end, too
        hang[(1,)](int(window.device["self"]), 1, ended, kind=kind)
    stage.attempt("first", node.synchronize)
    torch.cuda.synchronize()
    report({"ended": int(ended)})
    time.sleep(0.3)  # it aborts the job at its exit


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["wait", "barrier", "get_word"])
def test_a_rank_that_does_not_come_is_named_at_the_deadline(kind):
    played = play(2, missed, kind, survivable=True, backend="cuda")
    first = played.raised(0, "first", "PeerTimeout")
    assert first.ranks == [1]
    assert first.seconds < 3 + LIMIT_S
    assert played.rank(0)["ended"] == 1

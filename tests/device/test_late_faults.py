"""A rank dies, or does not come, while kernels wait for it: it is named, and the kernels end."""

import functools
import logging

import numpy as np
import pytest

import mpishare
from tests.helpers.launch import ROOT
from tests.helpers.reporting import report
from tests.helpers.scenes import play
from tests.helpers.stage import Stage

KINDS = {"wait": 1, "wait by a block": 2, "barrier": 3, "get_word": 4, "wait by a warp": 5}


def missed(stage: Stage, kind: int, how: str, is_killed: bool, root: str) -> None:
    from pathlib import Path

    import cupy

    logging.getLogger("mpishare").setLevel(logging.ERROR)
    node = stage.node(timeout_s=60.0 if is_killed else 3.0)
    code = (Path(root) / "tests" / "device" / "kernels.cu").read_text()
    module = cupy.RawModule(code=code, options=("--std=c++17", *mpishare.device.include()))
    hang, window = module.get_function("hang"), node.allocate_each(8, signals=4)
    ended, stream = cupy.zeros(1, "i4"), cupy.cuda.Stream(non_blocking=True)

    # Ranks that share a GPU without MPS take turns: `Node.launch` refuses that, CuPy does not.
    start = hang if node.report().time_sliced_gpus else functools.partial(node.launch, hang)

    def launch(number: int) -> None:
        start((1,), (64,), (window.device, np.int32(number), np.int32(1), ended))

    with stream:
        launch(0)
        stream.begin_capture()
        launch(kind)
        graph = stream.end_capture()
        node.synchronize()
        node.barrier()
        if not stage.is_missing(dies=is_killed):
            # Twice: what is enqueued behind the first must end, too.
            for _ in range(2):
                graph.launch() if how == "replayed" else launch(kind)
            if how == "CuPy's wait":
                stream.synchronize()
            stage.attempt("first", node.synchronize)
            stream.synchronize()
            report({"usable": int(ended[0]) == 1 and int(cupy.arange(10).sum()) == 45})
            stage.attempt("then", lambda: node.launch(hang, (1,), (64,), (window.device,)))
            stage.attempt("close", node.close)
    stage.end()


HOW = ("launched", "replayed", "CuPy's wait")


@pytest.mark.gpu
@pytest.mark.kills
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", KINDS)
def test_all_survivors_name_the_killed_rank(kind, how):
    played = play(3, missed, KINDS[kind], how, True, str(ROOT), survivable=True, backend="cuda")
    played.survivors_name(1, of=(0, 2))
    assert all(played.rank(rank)["usable"] for rank in (0, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_does_not_come_is_named_at_the_deadline(kind, how):
    played = play(3, missed, KINDS[kind], how, False, str(ROOT), survivable=True, backend="cuda")
    played.others_give_up()
    for rank in (0, 2):
        assert played.rank(rank)["usable"]
        assert played.told(rank, "then").error in ("PeerTimeout", "PeerError", "ClosedError")

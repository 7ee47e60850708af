"""A rank dies, or does not come, while a kernel waits for it: it is named, and the kernel ends.

Each block of the kernel waits in another way.
"""

import functools

import numpy as np
import pytest

import mpishare
from tests.helpers.launch import ROOT
from tests.helpers.reporting import report
from tests.helpers.scenes import play
from tests.helpers.stage import Stage


def missed(stage: Stage, how: str, is_killed: bool, root: str) -> None:
    from pathlib import Path

    import cupy

    stage.quiet()
    code = (Path(root) / "tests" / "device" / "kernels.cu").read_text()
    module = cupy.RawModule(code=code, options=("--std=c++17", *mpishare.device.include()))
    hang, stream = module.get_function("hang"), cupy.cuda.Stream(non_blocking=True)
    kinds = ["wait", "wait<block>", "barrier<block>", "get_word", "wait<warp>"]
    node = stage.node(timeout_s=60.0 if is_killed else 3.0)
    windows = [node.allocate_each(8, signals=4) for _ in kinds]
    ended = cupy.zeros(len(kinds), "i4")
    # Ranks that share a GPU without MPS take turns: `Node.launch` refuses that, CuPy does not.
    start = hang if node.report().time_sliced_gpus else functools.partial(node.launch, hang)

    def launch(waits: int = 1) -> None:
        devices = [window.device for window in windows]
        start((len(kinds),), (64,), (*devices, np.int32(waits), np.int32(1), ended))

    with stream:
        launch(waits=0)
        stream.begin_capture()
        launch()
        graph = stream.end_capture()
        node.synchronize()
        node.barrier()
        if not stage.is_missing(dies=is_killed):
            # Twice: what is enqueued behind the first must end, too.
            for _ in range(2):
                graph.launch() if how == "replayed" else launch()
            if how == "CuPy's wait":
                stream.synchronize()
            stage.attempt("first", node.synchronize)
            stream.synchronize()
            report({"ended": dict(zip(kinds, ended.tolist(), strict=True))})
            report({"usable": int(cupy.arange(10).sum()) == 45})
            stage.attempt("then", lambda: node.launch(hang, (1,), (64,), (windows[0].device,)))
        stage.attempt("close", node.close)
    stage.end()


@pytest.mark.gpu
@pytest.mark.kills
@pytest.mark.parametrize("how", ["launched", "replayed", "CuPy's wait"])
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "late"])
def test_the_rank_is_named_and_all_waits_end(how, is_killed):
    played = play(3, missed, how, is_killed, str(ROOT), survivable=True, backend="cuda")
    if is_killed:
        played.survivors_name(1, of=(0, 2))
    else:
        played.others_give_up()
    for rank in (0, 2):
        ended = played.rank(rank)["ended"]
        assert set(ended.values()) == {1}, f"rank {rank}: {ended}"
        assert played.rank(rank)["usable"]
        then = ("PeerTimeout", "PeerError", "ClosedError")
        assert is_killed or played.told(rank, "then").error in then

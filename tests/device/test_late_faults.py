"""A rank dies, or does not come, while a kernel waits for it: it is named, and the kernel ends.

Each block of the kernel waits in another way.

`MPISHARE_RUNS` is the number of runs of each scene, in one job: with 34 each wait has a hundred.
"""

import functools
import os

import numpy as np
import pytest

import mpishare
from tests.helpers.launch import ROOT
from tests.helpers.reporting import begin_run, report
from tests.helpers.scenes import play
from tests.helpers.stage import Stage

RUNS = int(os.environ.get("MPISHARE_RUNS", "1"))
# The driver makes the CUDA contexts of all processes of a machine one after the other.
LIMIT_S = 56.0 + 4 * RUNS


def missed(stage: Stage, how: str, is_killed: bool, root: str, runs: int) -> None:
    from pathlib import Path

    import cupy

    stage.quiet()
    code = (Path(root) / "tests" / "device" / "kernels.cu").read_text()
    module = cupy.RawModule(code=code, options=("--std=c++17", *mpishare.device.include()))
    hang, stream = module.get_function("hang"), cupy.cuda.Stream(non_blocking=True)
    last, timeout_s = stage.size - 1, 60.0 if is_killed else 3.0 if runs == 1 else 0.5

    kinds = ["wait", "wait<block>", "barrier<block>", "get_word", "wait<warp>"]

    def make(missing: int) -> tuple[mpishare.Node, list[mpishare.Window]]:
        of_run = stage.world.group.Incl([0, missing, last])
        node = stage.node(stage.world.Create_group(of_run, missing), timeout_s)
        return node, [node.allocate_each(8, signals=4) for _ in kinds]

    def run(number: int, missing: int, node: mpishare.Node, windows: list) -> None:
        ended = cupy.zeros(len(kinds), "i4")
        # Ranks that share a GPU without MPS take turns: `Node.launch` refuses that, CuPy does not.
        start = hang if node.report().time_sliced_gpus else functools.partial(node.launch, hang)

        def launch(waits: int = 1) -> None:
            devices = [window.device for window in windows]
            start((len(kinds),), (64,), (*devices, np.int32(waits), np.int32(1), ended))

        comes_back = not is_killed and number < runs - 1
        with stream:
            launch(waits=0)
            stream.begin_capture()
            launch()
            graph = stream.end_capture()
            node.synchronize()
            node.barrier()
            is_here = not stage.is_missing(dies=is_killed, rank=missing, comes_back=comes_back)
            if is_here:
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
        if comes_back:
            stage.world.Barrier()
        if not is_here:
            stage.attempt("close", node.close)

    # A rank dies once, so that each run loses another one; a late one comes back.
    missing = range(1, last) if is_killed else [1] * runs
    mine = [(number, rank) for number, rank in enumerate(missing) if stage.rank in (0, rank, last)]
    made = {number: make(rank) for number, rank in mine if is_killed}  # while all live
    for number, rank in mine:
        begin_run(number)
        run(number, rank, *(made.pop(number, None) or make(rank)))
    stage.end()


HOW = ("launched", "replayed", "CuPy's wait")


def play_missed(n: int, how: str, *, is_killed: bool):
    options = {"survivable": True, "backend": "cuda", "timeout_s": LIMIT_S - 20}
    return play(n, missed, how, is_killed, str(ROOT), RUNS, **options)


def all_waits_ended(run, *ranks: int) -> None:
    for rank in ranks:
        ended = run.rank(rank)["ended"]
        assert set(ended.values()) == {1}, f"rank {rank}: {ended}"
        assert run.rank(rank)["usable"]


@pytest.mark.gpu
@pytest.mark.kills
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("how", HOW)
def test_all_survivors_name_the_killed_rank(how):
    played = play_missed(2 + RUNS, how, is_killed=True)
    for number in range(RUNS):
        run = played.of_run(number, 0, 1 + number, 1 + RUNS)
        run.survivors_name(1, of=(0, 2))
        all_waits_ended(run, 0, 2)


@pytest.mark.gpu
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("how", HOW)
def test_a_rank_that_does_not_come_is_named_at_the_deadline(how):
    played = play_missed(3, how, is_killed=False)
    for number in range(RUNS):
        run = played.of_run(number, 0, 1, 2)
        run.others_give_up()
        all_waits_ended(run, 0, 2)
        for rank in (0, 2):
            assert run.told(rank, "then").error in ("PeerTimeout", "PeerError", "ClosedError")

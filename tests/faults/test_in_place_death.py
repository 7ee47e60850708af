"""A rank is killed whose array the others have mapped in place: they are told, and can end."""

import time

import pytest

from tests.faults.scenes import KILLING_BACKENDS, play
from tests.faults.stage import Stage


def killed(stage: Stage) -> None:
    node = stage.node()
    base = node.allocate_each(64, fill=stage.rank)
    # On CUDA an array of CuPy's pool, which a legacy handle opens.
    source = base.array[8:] if node.backend == "host" else node.xp.full(64, float(stage.rank))
    window = node.share_each(source, copy=False)
    window.fence()
    node.synchronize()
    node.barrier()
    if stage.rank == 1:
        time.sleep(0.2)
        stage.die()
    stage.attempt("fence", lambda: (window.fence(), node.synchronize()))
    stage.attempt("read", lambda: float(window.segment(1)[3]) == 1 or 1 / 0)
    stage.attempt("share", lambda: node.share_each(source, copy=False))
    stage.attempt("close", node.close)
    time.sleep(0.3 if stage.rank == 0 else 0.8)  # each aborts the job at its exit


@pytest.mark.parametrize("backend", KILLING_BACKENDS)
def test_survivors_are_told_and_keep_what_they_mapped(backend):
    played = play(3, killed, backend=backend, survivable=True)
    for rank in (0, 2):
        for call in ("fence", "share"):
            assert played.raised(rank, call, "PeerTimeout").ranks == [1]
        for call in ("read", "close"):
            assert played.told(rank, call).error is None, played.describe()

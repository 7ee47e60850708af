"""A rank is killed whose array the others have mapped in place: they are told, and can end."""

import pytest

from tests.helpers.reporting import report
from tests.helpers.scenes import play
from tests.helpers.stage import Stage

ON_GPU = [pytest.mark.gpu, pytest.mark.kills]
KINDS = [
    ("host", "window"),
    ("host", "file"),
    *(
        pytest.param("cuda", kind, marks=ON_GPU)
        for kind in ("window", "by_cupy", "by_pool", "by_torch", "by_torch_expandable")
    ),
]


def killed(stage: Stage, kind: str) -> None:
    node = stage.node()
    if kind == "window":
        source = node.allocate_each(64, "f4").array[8:]
        array = source
    elif kind == "file":
        import tempfile

        import numpy as np

        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            source = array = np.memmap(file, "f4", shape=64)
    else:
        from tests.windows import test_in_place_gpu as makers

        source = getattr(makers, kind)()
        array = makers.as_cupy(source)
    array[...] = stage.rank
    window = node.share_each(source, copy=False)
    window.fence()
    node.synchronize()
    node.barrier()
    if stage.rank == 1:
        stage.die(0.2)
    stage.attempt("first", lambda: (window.fence(), node.synchronize()))
    report({"read": float(window.segment(1)[3])})
    stage.attempt("then", lambda: node.share_each(source, copy=False))
    stage.attempt("close", node.close)
    stage.end()


@pytest.mark.parametrize(("backend", "kind"), KINDS)
def test_survivors_are_told_and_keep_what_they_mapped(backend, kind):
    played = play(3, killed, kind, backend=backend, survivable=True)
    played.survivors_name(1, of=(0, 2))
    assert [played.rank(rank)["read"] for rank in (0, 2)] == [1, 1]

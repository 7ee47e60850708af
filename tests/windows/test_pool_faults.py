"""The owner of a pool dies while other ranks hold arrays of it."""

import time

import pytest

from tests.helpers.reporting import report
from tests.helpers.scenes import KILLING_BACKENDS, play
from tests.helpers.stage import Stage


def owner_dies(stage: Stage) -> None:
    node = stage.node()
    pool = node.pool(owner=0)
    if stage.rank == 0:
        array = pool.allocate(1000, "u1")
        array[...] = 7
        node.synchronize()
    handle = node.comm.bcast(pool.handle(array) if stage.rank == 0 else None)
    opened = pool.open(handle) if stage.rank else None
    node.barrier()
    if stage.rank == 0:
        stage.die()
    stage.attempt("barrier", node.barrier)
    stage.attempt("open", pool.open, handle)
    report({"values": [int(opened[0]), int(opened[-1])]})
    del opened
    stage.attempt("close", node.close)
    time.sleep(0.3 if stage.rank == 1 else 0.8)


@pytest.mark.parametrize("backend", KILLING_BACKENDS)
def test_what_is_open_outlives_the_owner(backend):
    played = play(3, owner_dies, backend=backend, survivable=True)
    for name in ("barrier", "open"):
        played.missed(0, name, of=(1, 2))
    assert [played.rank(rank)["values"] for rank in (1, 2)] == [[7, 7]] * 2
    played.worked((1, 2), "close")

"""Ranks die, or end, while they hold arrays of a pool."""

import time

import pytest

from tests.helpers.reporting import report
from tests.helpers.scenes import KILLING_BACKENDS, play
from tests.helpers.stage import Stage

NBYTES = 48 << 20


def importer_dies(stage: Stage, nbytes: int) -> None:
    from functools import partial

    node = stage.node()
    pool = node.pool(owner=0, max_nbytes=nbytes * 4 // 3)
    array = pool.allocate(nbytes, "u1") if stage.rank == 0 else None
    handle = node.comm.bcast(pool.handle(array) if stage.rank == 0 else None)
    opened = pool.open(handle) if stage.rank == 1 else None
    node.barrier()
    array = None
    if stage.rank == 0:
        stage.attempt("while it lives", pool.allocate, nbytes, "u1")
    node.barrier()
    if stage.rank == 1:
        stage.die()
    stage.attempt("barrier", node.barrier)
    call = partial(pool.allocate, nbytes, "u1") if stage.rank == 0 else partial(pool.open, handle)
    stage.attempt("use", call)
    stage.attempt("close the pool", pool.close)
    stage.attempt("close", node.close)
    stage.attempt("then", pool.allocate, 1)
    stage.end()
    del opened


@pytest.mark.parametrize("backend", KILLING_BACKENDS)
def test_a_pool_is_over_with_its_node(backend):
    played = play(3, importer_dies, NBYTES, backend=backend, survivable=True)
    assert played.told(0, "while it lives").error in ("UnsupportedError", "CudaError")
    for name in ("barrier", "use", "close the pool"):
        played.missed(1, name, of=(0, 2))
    played.worked((0, 2), "close")
    for rank in (0, 2):
        played.raised(rank, "then", "ClosedError")


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

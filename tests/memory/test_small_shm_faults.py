"""/dev/shm of 64 MiB: an error that says what to do, and no SIGBUS."""

import os

import numpy as np
import pytest

import mpishare
from tests.helpers.mounts import SMALL, mount_before_jobs
from tests.helpers.scenes import play
from tests.helpers.stage import Stage, leftovers


@pytest.fixture(autouse=True)
def in_small_shm(monkeypatch, tmp_path):
    """Jobs of this test start in a mount namespace with a /dev/shm of 64 MiB."""
    mount_before_jobs(monkeypatch, tmp_path, SMALL)


def too_large(stage: Stage) -> None:
    def free() -> int:
        stage.world.Barrier()
        room = os.statvfs("/dev/shm")
        assert room.f_blocks * room.f_frsize == 64 << 20
        return room.f_bavail * room.f_frsize

    with stage.node() as node:
        before = free()
        tree = [np.ones(60 << 20, "u1"), np.ones(50 << 20, "u1")]
        for call in (
            lambda: node.allocate(100 << 20, dtype="u1", owner=1),
            lambda: node.share_all(tree, owner=1),
        ):
            assert "--shm-size" in stage.fails_on(1, mpishare.UnsupportedError, call)
        # Three times 30 MiB: at least one does not fit, and nothing of the others is kept.
        told = stage.raises(
            mpishare.MpiShareError, lambda: node.allocate_each(30 << 20, dtype="u1", fill=1)
        )
        errors = {*stage.gather(type(told).__name__)}
        assert "UnsupportedError" in errors <= {"UnsupportedError", "PeerError"}
        del told
        assert free() == before
        node.allocate(16 << 20, dtype="u1", fill=1).close()
        assert free() == before
    assert leftovers() == []


def test_a_window_larger_than_shm():
    play(3, too_large).ended_well()


def pool_too_large(stage: Stage) -> None:
    with stage.node() as node:
        pool = node.pool(max_nbytes=80 << 20)  # more than /dev/shm has
        if stage.rank == 0:
            kept = pool.allocate(20 << 20, "u1")
            kept[...] = 1
            told = stage.raises(mpishare.UnsupportedError, pool.allocate, 60 << 20, "u1")
            assert "--shm-size" in str(told)
            assert int(kept.sum()) == 20 << 20
            del kept, told
            pool.allocate(30 << 20, "u1").fill(2)
        node.barrier()


def test_an_array_of_a_pool_larger_than_shm():
    """The pool itself takes no room: each array is refused before it is touched."""
    play(2, pool_too_large).ended_well()

"""/dev/shm of 64 MiB, or read-only: an error that says what to do, and no SIGBUS."""

import os

import numpy as np
import pytest

import mpishare
from tests.helpers.mounts import SMALL, mount_before_jobs
from tests.helpers.reporting import report
from tests.helpers.scenes import play
from tests.helpers.stage import Stage, leftovers


@pytest.fixture(autouse=True)
def in_small_shm(monkeypatch, tmp_path):
    """Jobs of this test start in a mount namespace with a /dev/shm of 64 MiB."""
    mount_before_jobs(monkeypatch, tmp_path, SMALL)


def too_large(stage: Stage, unchecked: bool) -> None:
    def free() -> int:
        room = os.statvfs("/dev/shm")
        return room.f_bavail * room.f_frsize

    stage.world.Barrier()
    report({"total": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize})
    if unchecked:
        mpishare.memory.shared._check_room = lambda nbytes: None
    with stage.node() as node:
        stage.world.Barrier()
        before = free()
        stage.attempt("allocate", lambda: node.allocate(100 << 20, dtype="u1", owner=1))
        tree = [np.ones(60 << 20, "u1"), np.ones(50 << 20, "u1")]
        stage.attempt("share_all", lambda: node.share_all(tree, owner=1))
        stage.attempt("allocate_each", lambda: node.allocate_each(30 << 20, dtype="u1", fill=1))
        stage.world.Barrier()
        report({"kept": before - free()})
        stage.attempt("go on", lambda: node.allocate(16 << 20, dtype="u1", fill=1).close())
        stage.world.Barrier()
        report({"kept after": before - free()})
    report({"leftovers": leftovers()})


@pytest.mark.parametrize("unchecked", [False, True], ids=["asked first", "refused by the kernel"])
def test_a_window_larger_than_shm(unchecked):
    played = play(3, too_large, unchecked)
    assert played.rank(0)["total"] == 64 << 20
    for call in ("allocate", "share_all"):
        assert "--shm-size" in played.raised(1, call, "UnsupportedError").text
        for rank in (0, 2):
            assert list(played.raised(rank, call, "PeerError").failures) == [1]
    # Three times 30 MiB: at least one does not fit, and nothing of the others is kept.
    errors = [played.told(rank, "allocate_each").error for rank in range(3)]
    assert set(errors) <= {"UnsupportedError", "PeerError"}
    assert "UnsupportedError" in errors
    played.worked(range(3), "go on")
    for rank in range(3):
        assert played.rank(rank)["kept"] == 0, played.describe()
        assert played.rank(rank)["kept after"] == 0
        assert played.rank(rank)["leftovers"] == []
    played.ended_well()


def pool_too_large(stage: Stage) -> None:
    with stage.node() as node:
        pool = node.pool(max_nbytes=1 << 40)
        if stage.rank == 0:
            kept = pool.allocate(20 << 20, "u1")
            kept[...] = 1
            stage.attempt("too large", pool.allocate, 60 << 20, "u1")
            report({"still": int(kept.sum())})
            del kept
            stage.attempt("go on", lambda: pool.allocate(30 << 20, "u1").fill(2))
        node.barrier()


def test_an_array_of_a_pool_larger_than_shm():
    """The pool itself takes no room: each array is refused before it is touched."""
    played = play(2, pool_too_large)
    assert "--shm-size" in played.raised(0, "too large", "UnsupportedError").text
    assert played.rank(0)["still"] == 20 << 20
    played.worked([0], "go on")
    played.ended_well()


def no_room(stage: Stage) -> None:
    stage.world.Barrier()
    if stage.rank == 0:
        room = os.statvfs("/dev/shm")
        with open("/dev/shm/ballast", "wb") as file:  # noqa: PTH123
            os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize - 4096)
    stage.world.Barrier()
    stage.attempt("node", stage.node)
    stage.world.Barrier()
    if stage.rank == 0:
        os.unlink("/dev/shm/ballast")  # noqa: PTH108
    stage.world.Barrier()
    stage.second_node(stage.world)
    report({"leftovers": leftovers()})


def test_no_room_for_the_node_itself():
    played = play(3, no_room)
    assert "--shm-size" in played.raised(0, "node", "UnsupportedError").text
    for rank in (1, 2):
        told = played.raised(rank, "node", "PeerError")
        assert list(told.failures) == [0]
        assert "--shm-size" in told.failures[0]
    played.worked(range(3), "second node")
    assert all(played.rank(rank)["leftovers"] == [] for rank in range(3))
    played.ended_well()


def read_only(stage: Stage) -> None:
    import subprocess

    def change(*command: str) -> None:
        stage.world.Barrier()
        if stage.rank == 0:
            subprocess.run(command, check=True)
        stage.world.Barrier()

    change("mount", "-t", "tmpfs", "-o", "ro", "tmpfs", "/dev/shm")  # MPI itself has what it needs
    stage.attempt("node", stage.node)
    change("umount", "/dev/shm")
    stage.second_node(stage.world)
    report({"leftovers": leftovers()})


def test_read_only():
    played = play(3, read_only)
    told = played.raised(0, "node", "UnsupportedError")
    assert "Read-only file system" in told.text
    assert "mount -t tmpfs" in told.text
    for rank in (1, 2):
        assert list(played.raised(rank, "node", "PeerError").failures) == [0]
    played.worked(range(3), "second node")
    assert all(played.rank(rank)["leftovers"] == [] for rank in range(3))
    played.ended_well()

"""With MPISHARE_CHECK=1 a race between two ranks is an error, and a right program has none."""

import sys

import numpy as np
import pytest

import mpishare
from tests.helpers.launch import ROOT, run_ranks
from tests.helpers.reporting import report
from tests.helpers.scenes import play
from tests.helpers.stage import Stage


def forgotten_fences(stage: Stage, size: int, count: int) -> None:
    node = stage.node()
    window = node.allocate(size, fill=0.0)
    found = []
    for number in range(count):
        if node.rank == 0:
            window.array[...] = number + 1
        if node.rank == node.size - 1:
            window.array.sum()
        try:
            window.fence()
        except mpishare.EpochError as error:
            found.append(str(error))
        window.fence()
    node.close()
    report({"found": len(found), "text": found[0] if found else ""})


@pytest.mark.parametrize("nranks", [2, 4])
@pytest.mark.parametrize("size", [1, 20_000])
def test_a_forgotten_fence_is_found_each_time(nranks, size, monkeypatch):
    monkeypatch.setenv("MPISHARE_CHECK", "1")
    for told in reported(play(nranks, forgotten_fences, size, 50), nranks):
        assert told["found"] == 50
        text = told["text"]
        assert "window 1: fence failed: rank 0 wrote" in text
        assert f"rank {nranks - 1} read at" in text
        assert text.count(".py:") == 2


def test_without_the_variable_nothing_is_checked():
    assert all(t["found"] == 0 for t in reported(play(2, forgotten_fences, 1, 5), 2))


def two_writers(stage: Stage, stride: int) -> None:
    node = stage.node()
    window = node.allocate(64, "i4", fill=0)
    window.array[node.rank * stride] = 1
    is_found = False
    try:
        window.fence()
    except mpishare.EpochError:
        is_found = True
    node.close()
    report({"found": is_found})


@pytest.mark.parametrize("stride", [0, 1])
def test_two_writers_of_one_element_and_of_two(stride, monkeypatch):
    monkeypatch.setenv("MPISHARE_CHECK", "1")
    for told in reported(play(2, two_writers, stride), 2):
        assert told["found"] == (stride == 0)


def own_barrier(stage: Stage) -> None:
    node = stage.node()
    window = node.allocate(1, fill=0.0)
    if node.rank == 0:
        window.array[0] = 1
    node.comm.Barrier()
    seen = float(window.array[0])
    stage.attempt("fence", window.fence)
    node.close()
    report({"seen": seen})


def test_a_barrier_of_mpi_makes_no_order(monkeypatch):
    monkeypatch.setenv("MPISHARE_CHECK", "1")
    played = play(2, own_barrier)
    for rank in range(2):
        text = played.raised(rank, "fence", "EpochError").text
        assert "The program's own MPI messages and barriers do not count" in text


@pytest.mark.parametrize("name", ["02_halo_1d", "15_disjoint_writers", "23_fft2"])
def test_right_examples_have_no_race(name):
    command = [sys.executable, "-m", "mpi4py", ROOT / "scripts" / "examples" / f"{name}.py"]
    env = {"MPISHARE_BACKEND": "host", "MPISHARE_CHECK": "1"}
    result = run_ranks(2, command, env=env)
    assert result.returncode == 0, result.describe()


def every_order(stage: Stage) -> None:
    """Rank 0 writes and rank 1 reads, in the order of each call that makes one."""
    node = stage.node()
    window, event = node.allocate(4096, fill=0.0), node.event()
    channel = node.channel(1, consumers=[1])
    right, number = [], 0

    def write() -> None:
        nonlocal number
        number += 1
        if node.rank == 0:
            window.array[...] = number

    def read() -> None:
        if node.rank == 1:
            right.append(bool((window.array == number).all()))

    for _ in range(3):
        for order in (window.fence, node.barrier, lambda: node.event().close()):
            write()
            order()
            read()
            order()
        write()
        if node.rank == 0:
            window.post([1])
            window.wait()
            event.record()
        else:
            window.start([0])
            read()
            window.complete()
            event.wait()
        write()
        if node.rank == 0:
            with channel.put() as slot:
                slot[...] = 1
        else:
            with channel.get():
                read()
        node.barrier()
        total = mpishare.Allreduce(node.comm, np.ones(1), node=node)
        write()
        total.reduce(np.ones(1))
        read()
        total.close()
    node.close()
    report({"right": all(right)})


def test_every_order_is_known(monkeypatch):
    monkeypatch.setenv("MPISHARE_CHECK", "1")
    assert all(told["right"] for told in reported(play(2, every_order), 2))


def without_c(stage: Stage) -> None:
    stage.attempt("node", stage.node)


def test_a_node_without_compiled_code_is_refused(monkeypatch):
    monkeypatch.setenv("MPISHARE_CHECK", "1")
    monkeypatch.setenv("MPISHARE_HOST_CODE", "python")
    played = play(2, without_c)
    for rank in range(2):
        text = played.raised(rank, "node", "UnsupportedError").text
        assert "needs the compiled part" in text


def reported(played, nranks):
    played.ended_well()
    return [played.rank(rank) for rank in range(nranks)]

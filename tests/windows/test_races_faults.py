"""With MPISHARE_CHECK=1 a race between two ranks is an error, and a right program has none."""

import os
import sys

import numpy as np
import pytest

import mpishare
from tests.helpers.compiled import needs_compiled
from tests.helpers.launch import ROOT, run_right
from tests.helpers.scenes import play
from tests.helpers.stage import Stage


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    monkeypatch.setenv("MPISHARE_CHECK", "1")


def seen_where_it_is(stage: Stage) -> None:
    """Each way to touch elements is an access to those alone: of halves there is no race."""
    node = stage.node()
    window = node.allocate(8, fill=1.0)
    half = np.s_[:4] if node.rank == 0 else np.s_[4:]
    ways = {
        "ufunc": lambda part: np.add(part, 1, out=part),
        "in place": lambda part: part.__imul__(2),
        "at": lambda part: np.add.at(part, [0, 3], 1),
        "a view of bytes": lambda part: part.view("u1").fill(0),
        "copyto": lambda part: np.copyto(part, 3),
        "scalar": lambda part: part.__setitem__(-1, part[0]),
        "mask": lambda part: part.__setitem__(part > 0, 4),
        "sort": lambda part: part.sort(),
    }
    for name, touch in ways.items():
        touch(window.array[half])
        window.fence()
        touch(window.array)
        try:
            stage.raises(mpishare.EpochError, window.fence)
        except AssertionError as error:
            error.add_note(name)
            raise
    reads = {
        "concatenate": lambda array: np.concatenate([array, array]),
        "copy": np.copy,
        "tolist": lambda array: array.tolist(),
        "norm": np.linalg.norm,
        "number": lambda array: float(array[0]),
        "iteration": sum,
    }
    for read in reads.values():
        if node.rank == 0:
            window.array[...] = 1
        else:
            read(window.array)
        stage.raises(mpishare.EpochError, window.fence)
    window.array += 1
    stage.raises(mpishare.EpochError, window.fence)
    node.close()


@needs_compiled
def test_accesses_are_seen_where_they_are():
    play(2, seen_where_it_is).ended_well()


def forgotten_fences(stage: Stage, size: int, count: int) -> None:
    node = stage.node()
    window = node.allocate(size, fill=0.0)
    for number in range(count):
        if node.rank == 0:
            window.array[...] = number + 1
        if node.rank == node.size - 1:
            window.array.sum()
        if "MPISHARE_CHECK" in os.environ:
            text = str(stage.raises(mpishare.EpochError, window.fence))
            assert "window 1: fence failed: rank 0 wrote" in text
            assert f"rank {node.size - 1} read at" in text
            assert text.count(".py:") == 2
        window.fence()
    node.close()


@needs_compiled
@pytest.mark.parametrize("nranks", [2, 4])
@pytest.mark.parametrize("size", [1, 20_000])
def test_a_forgotten_fence_is_found_each_time(nranks, size):
    play(nranks, forgotten_fences, size, 50).ended_well()


def test_without_the_variable_nothing_is_checked(monkeypatch):
    monkeypatch.delenv("MPISHARE_CHECK")
    play(2, forgotten_fences, 1, 5).ended_well()


def beside_and_the_same(stage: Stage) -> None:
    """Elements that both ranks touch are a race; those beside each other, of any size, are none."""
    node = stage.node()

    def fill(key, value=node.rank + 1):
        return lambda array: array.__setitem__(key, value)

    def read(key):
        return lambda array: array[key].copy()

    inner, last_column = np.s_[1:-1, 1:-1], np.s_[1:-1, -2]
    races = {
        "two writers of one element": (64, fill(0), fill(0)),
        "one element amid a large fill": (131_072, fill(...), read(10_000)),
        "every third, and one of them": (1000, fill(np.s_[::3]), read([300, 301])),
        "a grid and its last column": ((34, 34), fill(inner), read(last_column)),
        "a sum in place": (10, lambda array: np.add(array, 1, out=array), read(5)),
        "one number and a copy of all": (1000, fill(-1), read(...)),
    }
    for name, (shape, write, look) in races.items():
        window = node.allocate_each(shape, fill=0)
        write(window.array)
        look(window.segment(1 - node.rank))
        try:
            stage.raises(mpishare.EpochError, window.fence)
        except AssertionError as error:
            error.add_note(name)
            raise
        window.close()
    for dtype, border in (("f8", 513), ("i1", 7), ("c16", 3)):
        window = node.allocate(1000, dtype, fill=0)
        part = window.array[:border] if node.rank == 0 else window.array[border:]
        part[::-1] = np.arange(len(part))
        part[-1] = part[0]
        window.fence()
    node.close()


@needs_compiled
def test_races_are_of_elements():
    play(2, beside_and_the_same).ended_well()


def own_barrier(stage: Stage) -> None:
    node = stage.node()
    window = node.allocate(1, fill=0.0)
    if node.rank == 0:
        window.array[0] = 1
    node.comm.Barrier()
    assert window.array[0] == 1
    told = stage.raises(mpishare.EpochError, window.fence)
    assert "The program's own MPI messages and barriers do not count" in str(told)
    node.close()


@needs_compiled
def test_a_barrier_of_mpi_makes_no_order():
    play(2, own_barrier).ended_well()


@needs_compiled
@pytest.mark.parametrize("name", ["02_halo_1d", "09_pool", "23_fft2"])
def test_right_examples_have_no_race(name):
    command = [sys.executable, "-m", "mpi4py", ROOT / "scripts" / "examples" / f"{name}.py"]
    run_right(2, command)


def every_order(stage: Stage) -> None:
    """Rank 0 writes and rank 1 reads, in the order of each call that makes one."""
    node = stage.node()
    window, event = node.allocate(4096, fill=0.0), node.event()
    channel = node.channel(1, consumers=[1])
    number = 0

    def write() -> None:
        nonlocal number
        number += 1
        if node.rank == 0:
            window.array[...] = number

    def read() -> None:
        if node.rank == 1:
            assert (window.array == number).all()

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


@needs_compiled
def test_every_order_is_known():
    play(2, every_order).ended_well()


def without_c(stage: Stage) -> None:
    told = stage.raises(mpishare.UnsupportedError, stage.node)
    assert "needs the compiled part" in str(told)


def test_a_node_without_compiled_code_is_refused(monkeypatch):
    monkeypatch.setenv("MPISHARE_HOST_CODE", "python")
    play(2, without_c).ended_well()

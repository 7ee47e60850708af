"""The compiled part of the host backend: beside ranks without it, late ranks, and odd calls."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpishare
from mpishare import MpiShareError, Node, UnsupportedError, native
from mpishare.errors import warn_once
from tests.helpers.compiled import needs_compiled
from tests.helpers.halos import (
    Kind,
    arrays,
    check,
    even_case,
    exchanging,
    make_fields,
    plan,
    random_plan,
)
from tests.helpers.latch import waits_on_host, within
from tests.helpers.rings import ring

TWO = pytest.mark.ranks(min=2)
pytestmark = needs_compiled


@pytest.fixture(params=["compiled", "one in Python", "one in C"])
def mixed_node(request, monkeypatch):
    """A node whose ranks are not all alike."""
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    in_c = {"compiled": size, "one in Python": size - 1, "one in C": 1}[request.param]
    monkeypatch.setenv("MPISHARE_HOST_CODE", "" if rank < in_c else "python")
    with Node(backend="host", timeout_s=40) as node:
        assert (node.report().native_missing is None) == (in_c == size)
        yield node


def test_the_report_says_which_it_is(monkeypatch):
    for choice, text in (("compiled", "compiled C"), ("python", "Python, which is slower")):
        monkeypatch.setenv("MPISHARE_HOST_CODE", choice)
        with Node(backend="host") as node:
            assert f"made by {text}" in str(node.report())


@TWO
def test_the_report_names_the_ranks_in_python(monkeypatch, caplog):
    """On all ranks alike; so does the log of rank 0."""
    rank, last = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size - 1
    monkeypatch.setenv("MPISHARE_HOST_CODE", "python" if rank == last else "")
    with caplog.at_level("INFO", logger="mpishare"), Node(backend="host") as node:
        told = f"made by Python, which is slower: rank {last}: MPISHARE_HOST_CODE=python"
        assert told in str(node.report())
    assert (f"in Python: rank {last}: " in caplog.text) == (rank == 0)


@pytest.fixture
def absent(monkeypatch, tmp_path):
    """The compiled part was not built."""
    monkeypatch.setattr(native, "_FILE", tmp_path / "_host.abi3.so")
    monkeypatch.setattr(native, "load", native.load.__wrapped__)  # it was found before
    warn_once.cache_clear()


def test_without_it_rank_0_warns(absent, monkeypatch, caplog):
    monkeypatch.delenv("MPISHARE_HOST_CODE", raising=False)  # where Python is asked for, none
    with Node(backend="host"), Node(backend="host") as node:
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        told = "exchanges and fences on the host are made in Python: it was not built; in "
        # Where /dev/shm is small, each node may warn of that, too.
        assert sum(told in line for line in said) == (not node.rank)


@pytest.mark.parametrize("everywhere", [True, pytest.param(False, marks=TWO)])
def test_what_is_asked_for_and_not_there_is_an_error_on_all_ranks(absent, monkeypatch, everywhere):
    asks = everywhere or MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1
    monkeypatch.setenv("MPISHARE_HOST_CODE", "compiled" if asks else "python")
    told = "cannot be had: it was not built"
    with pytest.raises(UnsupportedError if asks else mpishare.PeerError, match=told):
        Node(backend="host")


def test_random_plans_on_ranks_of_both_kinds(mixed_node):
    """A plan uses C where all of its ranks have it."""
    for seed in range(700, 712):
        random_plan(mixed_node, mixed_node.comm, seed)


def accumulated(node, case, kinds, values):
    """The bits of fields with these values after an exchange and an accumulation."""
    with exchanging(node, case, kinds) as (halo, fields):
        for field, value in zip(fields, values, strict=True):
            field.array[...] = value
        halo.exchange(*arrays(fields))
        halo.accumulate(*arrays(fields))
    # Long doubles have bytes that mean nothing.
    found = [field.array.astype(field.array.dtype.str.replace("f16", "f8")) for field in fields]
    return [array.tobytes() for array in found]


@pytest.mark.parametrize("corners", [False, True])
def test_the_bits_of_an_accumulation_are_those_of_the_reference(mixed_node, monkeypatch, corners):
    """Of numbers whose sums depend on the order, and of those that NumPy adds for C."""
    node = mixed_node
    case = even_case((node.size, 1), True, 4, ((1, 2), (2, 1)), corners=corners)
    kinds = [Kind("f4", "strided"), Kind("c8", "F"), Kind("i2"), Kind("f8", "offset")]
    for more in ([], [Kind("f2")], [Kind(">f8"), Kind("g")]):
        given = kinds + more
        rng = np.random.default_rng([node.rank, len(given)])
        shapes = [each.array.shape for each in make_fields(node, case, given)]
        values = [rng.standard_normal(each) * 10.0 ** rng.integers(-3, 4, each) for each in shapes]
        found = accumulated(node, case, given, values)
        with monkeypatch.context() as patch:
            patch.setenv("MPISHARE_HOST_CODE", "python")
            with Node(backend="host", timeout_s=40) as other:
                assert accumulated(other, case, given, values) == found


def test_a_subclass_and_a_list_are_taken_by_python(host_node):
    """C knows arrays of NumPy itself alone."""

    class Mine(np.ndarray):
        pass

    node = host_node
    case = even_case((node.size,), True, 3, 1)
    (field,) = make_fields(node, case, [Kind("f8", others=(2,), axes=(0,))])
    with plan(node.comm, case, field.array, axes=(0,), node=node) as halo:
        for step, kind in enumerate((np.ndarray, Mine, np.ndarray)):
            field.put(step)
            halo.exchange(field.array.view(kind))
            check([field], step)


@TWO
def test_another_thread_runs_while_the_first_waits_and_is_refused_the_plan(host_node):
    """By its own error, and the exchange under way is not disturbed.

    Rank 0 comes once that has happened to each neighbor, whose main thread waits for it.
    """
    node = host_node
    neighbors = {1, node.size - 1}
    field, refused = np.full((4, 8), float(node.rank)), node.allocate_each(1, "i8", fill=0)
    with ring(node, field, axes=(0,)) as halo:

        def call():
            assert within(60, lambda: waits_on_host(node, node.rank))
            with pytest.raises(UnsupportedError):
                halo.exchange(field)
            refused.array[0] = 1

        if node.rank in neighbors:
            caller = threading.Thread(target=call)
            caller.start()
            halo.exchange(field)
            caller.join()
        else:
            theirs = [refused.segment(rank) for rank in neighbors]
            if node.rank == 0:
                assert within(60, lambda: all(each[0] for each in theirs))
            halo.exchange(field)
        assert (field[0] == (node.rank - 1) % node.size).all()


@TWO
@pytest.mark.filterwarnings("ignore:window 1.* was closed while arrays of it are held")
def test_a_window_that_is_closed_before_the_wait_is_an_error(compiled_node):
    """Also on a rank that reads out of windows itself, while nobody reads what it has.

    Each rank reads the cells of the one below; what the last one has, nobody reads.
    """
    node = compiled_node
    win = node.allocate_each((4, 4096), "f8")
    halo = ring(node, win.array, ((1, 0),), axes=(0,), periods=False)
    is_last = node.rank == node.size - 1
    field = np.zeros((4, 4096)) if is_last else win.array
    for _ in range(2):
        halo.exchange(field)
    halo.start(field)
    win.close()
    with pytest.raises(MpiShareError, match=r"window 1.* is closed"):
        halo.wait()


@pytest.mark.parametrize("call", ["exchange", "accumulate"])
def test_other_threads_go_on_while_large_cells_are_copied(call):
    """In some call, for less than half of it, as the machine may be busy with other things."""
    u = np.ones((3, 1500, 1500))
    longest, is_over = [0.0], threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not is_over.wait(0.0002):
            now = time.perf_counter()
            longest[0] = max(longest[0], now - last)
            last = now

    def stall_of(make: Callable[[Any], None]) -> float:
        longest[0], begin = 0.0, time.perf_counter()
        make(u)
        seconds = time.perf_counter() - begin
        is_over.wait(0.01)  # the thread notes how long it has stood still
        return longest[0] / seconds

    with Node(MPI.COMM_SELF, backend="host") as node:
        halo = ring(node, u, 400, axes=(2,))
        getattr(halo, call)(u)
        thread = threading.Thread(target=tick)
        thread.start()
        try:
            assert any(stall_of(getattr(halo, call)) < 0.5 for _ in range(40))
        finally:
            is_over.set()
            thread.join()

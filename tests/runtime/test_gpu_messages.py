"""Whether messages go out of GPU memory: what an MPI tells, what ranks answer, what is said."""

import logging
from types import SimpleNamespace

import pytest

from mpishare import UnsupportedError
from mpishare.plans import gpu_memory, routes
from mpishare.runtime.gpu_messages import GPU_AWARE, tells_cuda, why_not
from mpishare.runtime.route import GPU_MESSAGES, MESSAGES


@pytest.mark.parametrize(
    ("kinds", "right"),
    [
        (None, False),
        ("mpi,system", False),
        ("mpi,system,cuda", True),
        ("system, cuda:device:managed", True),
        ("mpi,system,cuda:host", False),
        ("mpi,rocm:device", False),
    ],
)
def test_what_an_mpi_tells(kinds, right):
    assert tells_cuda(kinds) is right


@pytest.mark.parametrize(("said", "why"), [("1", None), ("0", f"{GPU_AWARE}=0")])
def test_what_the_user_says_counts(monkeypatch, said, why):
    monkeypatch.setenv(GPU_AWARE, said)
    assert why_not() == why


def test_a_wrong_word_of_the_user_is_refused(monkeypatch):
    monkeypatch.setenv(GPU_AWARE, "yes")
    with pytest.raises(ValueError, match="neither '0' nor '1'"):
        why_not()


def comm(rank, here, size):
    return SimpleNamespace(
        rank=rank, ranks_here=dict.fromkeys(here), is_of_one_node=len(here) == size
    )


def test_one_rank_per_node_asks_and_only_for_messages():
    asks = gpu_memory.asks
    for rank, here in enumerate([(0, 1), (0, 1), (2, 3), (2, 3)]):
        assert asks(comm(rank, here, 4), None) is (rank in (0, 2))
        assert asks(comm(rank, here, 4), "mpi-host") is False
    for name, right in ((None, False), ("copy", False), ("mpi", True), ("mpi-gpu", True)):
        assert asks(comm(0, range(4), 4), name) is right


def test_one_node_that_cannot_is_enough():
    assert gpu_memory.answer_of([None, None], None) is None
    assert gpu_memory.answer_of(["", None, ""], None) == ""
    assert gpu_memory.answer_of(["", None, "no"], "mpi") == "no"
    assert gpu_memory.answer_of(["", ""], "mpi-host") is None
    with pytest.raises(UnsupportedError, match="ended by SIGSEGV"):
        gpu_memory.answer_of(["", "ended by SIGSEGV"], "mpi-gpu")


def test_who_allows_messages_allows_the_faster_ones():
    taken = [{1: GPU_MESSAGES}, {0: MESSAGES}]
    setup = SimpleNamespace(call="HaloExchange", comm=SimpleNamespace(ranks_here={}))
    setup.same = {"require": ["mpi"]}
    routes.refuse(setup, taken)
    setup.same = {"require": ["mpi-gpu"]}
    with pytest.raises(UnsupportedError, match="refuses mpi among ranks 0, 1"):
        routes.refuse(setup, taken)


@pytest.mark.parametrize(("why", "level"), [("it crashed", "WARNING"), ("", "INFO")])
def test_which_memory_messages_use_is_said_by_one_rank(caplog, why, level):
    with caplog.at_level(logging.INFO, "mpishare"):
        for rank in range(2):
            gpu_memory.log_memory("HaloExchange 1", comm(rank, (rank,), 2), why)
    (record,) = caplog.records
    assert record.levelname == level
    assert why in record.getMessage()

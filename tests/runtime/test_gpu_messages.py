"""Whether messages go out of GPU memory: what an MPI tells, what ranks answer, what is said."""

import logging
from types import SimpleNamespace

import pytest

from mpishare import UnsupportedError
from mpishare.plans import routes
from mpishare.runtime.route import (
    GPU_AWARE,
    GPU_MESSAGES,
    MESSAGES,
    tells_cuda,
    why_no_gpu_messages,
)


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
    assert why_no_gpu_messages() == why


def test_a_wrong_word_of_the_user_is_refused(monkeypatch):
    monkeypatch.setenv(GPU_AWARE, "yes")
    with pytest.raises(ValueError, match="neither '0' nor '1'"):
        why_no_gpu_messages()


def setup_of(rank=0, name=None):
    """A plan of fields on GPUs."""
    return SimpleNamespace(
        name="HaloExchange 1",
        call="HaloExchange",
        on_gpu=True,
        same={"MPISHARE_ROUTE": name},
        comm=SimpleNamespace(rank=rank),
        context=SimpleNamespace(gpu_messages=None),
    )


@pytest.mark.parametrize(
    ("name", "answers", "has_messages", "right"),
    [
        (None, ["", ""], True, True),
        (None, ["", ""], False, False),
        ("mpi", ["", "no"], True, False),
        ("mpi-gpu", ["", ""], True, True),
        ("mpi-host", ["", ""], True, False),
    ],
)
def test_one_rank_that_cannot_is_enough(name, answers, has_messages, right):
    setup = setup_of(name=name)
    assert routes.settle_messages(setup, answers, has_messages=has_messages) is right
    assert right is (setup.context.gpu_messages == "")


def test_what_is_forced_and_cannot_be_is_refused():
    with pytest.raises(UnsupportedError, match="ended by SIGSEGV"):
        routes.settle_messages(
            setup_of(name="mpi-gpu"), ["", "ended by SIGSEGV"], has_messages=True
        )


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
        for setup in map(setup_of, range(2)):
            for _ in range(2):
                routes.settle_messages(setup, ["", why], has_messages=True)
    (record,) = caplog.records
    assert record.levelname == level
    assert why in record.getMessage()

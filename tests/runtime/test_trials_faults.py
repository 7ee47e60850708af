"""Trials in a child process: of messages in memory that the MPI may not take."""

import sys

import pytest

from mpishare.runtime.gpu_messages import MPI_TRIAL, run_in_child
from tests.helpers.launch import run_right

A_TRIAL = """
from pathlib import Path

from mpishare.runtime.gpu_messages import run_in_child
from mpi4py import MPI
from tests.helpers import host_trial

answers = MPI.COMM_WORLD.allgather(run_in_child(Path(host_trial.__file__), {memory!r}))
if MPI.COMM_WORLD.rank == 0:
    print(answers)
"""


@pytest.mark.parametrize(
    ("memory", "expected"),
    [("host", [None, None]), ("unreadable", ["ended by SIGSEGV"] * 2)],
    ids=["right", "crash"],
)
def test_a_trial_of_mpi_answers_and_harms_nobody(memory: str, expected: list[str | None]) -> None:
    # Under a launcher, whose ranks the children must not be taken for.
    result = run_right(2, A_TRIAL.format(memory=memory))
    assert result.stdout.strip() == str(expected), result.describe()


BYTES_GO_ELSEWHERE = """
from mpishare.runtime.mpi_trial import arrives
from tests.helpers.host_trial import Host

source, target, other = (Host(64) for _ in range(3))
assert arrives(source, target, 64)
target.address = other.address
target.fill(0)
assert not arrives(source, target, 64)
"""


def test_a_trial_sees_bytes_that_do_not_arrive() -> None:
    run_right(1, BYTES_GO_ELSEWHERE)


def test_a_trial_that_cannot_be_made_says_why() -> None:
    answer = run_in_child(MPI_TRIAL, 0)
    if "cupy" in sys.modules or answer is None:
        pytest.skip("there is a GPU")
    assert "cupy" in answer.lower() or "cuda" in answer.lower(), answer


def test_a_trial_that_hangs_ends(tmp_path) -> None:
    program = tmp_path / "hangs.py"
    program.write_text("import signal\nsignal.pause()\n")
    assert run_in_child(program, timeout_s=0.5) == "no answer within 0.5 s"

"""A launcher that started several ranks, each of which believes to be alone."""

import os
import subprocess

import pytest

from tests.helpers.children import python
from tests.helpers.launch import OF_A_JOB, OPEN_MPI, ROOT, launcher

PROGRAM = """
import mpishare
try:
    mpishare.Node()
except mpishare.UnsupportedError as error:
    print(error)
else:
    print("made")
"""
FOREIGN = {"openmpi": "PMI_SIZE", "mpich": "OMPI_COMM_WORLD_SIZE"}


PROTOCOLS = ("pmi2", "pmix")


def started_alone(**env: str) -> str:
    done = run_alone(PROGRAM, **env)
    assert done.returncode == 0, done
    return done.stdout


def run_alone(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith((*OF_A_JOB, "SLURM_"))}
    env = {**OPEN_MPI, **inherited, "MPISHARE_BACKEND": "host", "PYTHONPATH": str(ROOT), **env}
    return python(program, env=env, timeout_s=40)


def test_srun_without_the_right_mpi_option():
    said = started_alone(SLURM_STEP_NUM_TASKS="4")
    assert "srun started 4 processes (SLURM_STEP_NUM_TASKS=4)" in said
    right, wrong = PROTOCOLS if launcher()[1] == "mpich" else PROTOCOLS[::-1]
    assert f"Give srun --mpi={right}." in said
    assert wrong not in said


def test_the_other_processes_say_it_in_one_line():
    done = run_alone("import mpishare; mpishare.Node()", SLURM_STEP_NUM_TASKS="4", SLURM_PROCID="2")
    assert done.returncode == 1, done
    line = done.stderr.splitlines()[-1]
    words = "mpishare.errors.UnsupportedError: process 2 of 4 is alone in MPI.COMM_WORLD, as the"
    assert line.startswith(words), done


def test_mpirun_of_another_mpi():
    name = FOREIGN[launcher()[1]]
    said = started_alone(**{name: "4"})
    assert f"started 4 processes ({name}=4)" in said
    assert "Start it with the mpirun of the MPI library" in said


@pytest.mark.parametrize("count", ["", "1"])
def test_control_one_process_is_right_where_one_was_started(count):
    env = {"SLURM_STEP_NUM_TASKS": count} if count else {}
    assert started_alone(**env) == "made\n"

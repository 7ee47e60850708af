"""A launcher that started several ranks, each of which believes to be alone."""

import os
import subprocess
import sys

import pytest

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


def started_alone(**env: str) -> str:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith((*OF_A_JOB, "SLURM_"))}
    env = {**OPEN_MPI, **inherited, "MPISHARE_BACKEND": "host", "PYTHONPATH": str(ROOT), **env}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=40)
    assert done.returncode == 0, done
    return done.stdout


def test_srun_without_the_right_mpi_option():
    said = started_alone(SLURM_STEP_NUM_TASKS="4")
    assert "srun started 4 processes (SLURM_STEP_NUM_TASKS=4)" in said
    assert "--mpi=pmi2" in said
    assert "--mpi=pmix" in said


def test_mpirun_of_another_mpi():
    name = FOREIGN[launcher()[1]]
    said = started_alone(**{name: "4"})
    assert f"started 4 processes ({name}=4)" in said
    assert "Start it with the mpirun of the MPI library" in said


@pytest.mark.parametrize("count", ["", "1"])
def test_control_one_process_is_right_where_one_was_started(count):
    env = {"SLURM_STEP_NUM_TASKS": count} if count else {}
    assert started_alone(**env) == "made\n"

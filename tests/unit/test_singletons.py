"""Silent singletons: N processes that are each alone, though a launcher started N."""

import pytest

from mpishare import UnsupportedError
from mpishare.setup.preflight import check_singleton


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"PATH": "/bin", "SLURM_NTASKS": "8"},
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_SIZE": "1", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_STEP_NUM_TASKS": ""},
        {"PMI_SIZE": "many"},
    ],
)
def test_alone_as_meant(environment):
    check_singleton(1, environment, "MPICH")


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_several_ranks_are_no_singleton(name):
    check_singleton(4, {name: "4"}, "MPICH")
    check_singleton(2, {name: "4"}, "MPICH")


@pytest.mark.parametrize(
    ("name", "todo"),
    [
        ("SLURM_STEP_NUM_TASKS", "--mpi=pmi2"),
        ("SLURM_STEP_NUM_TASKS", "--mpi=pmix"),
        ("OMPI_COMM_WORLD_SIZE", "mpirun of the MPI library that mpi4py uses"),
        ("PMI_SIZE", "mpirun of the MPI library that mpi4py uses"),
    ],
)
def test_silent_singleton_is_told_what_to_do(name, todo):
    with pytest.raises(UnsupportedError) as caught:
        check_singleton(1, {name: "4"}, "MPICH 5.0.2")
    assert todo in str(caught.value)
    assert f"{name}=4" in str(caught.value)
    assert "MPICH 5.0.2" in str(caught.value)

"""Silent singletons: N processes that are each alone, though a launcher started N."""

import pytest

from mpishare import UnsupportedError
from mpishare.runtime.preflight import check_singleton, one_gpu_note

MPICH, OPEN_MPI = "MPICH Version: 5.0.2\nMPICH Release date: ...", "Open MPI v5.0.8, package: ..."
STEP = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}
# As seen: srun --mpi=pmi2 sets the variables of an mpirun, and mpirun in a job uses srun.
PMI2 = {**STEP, "PMI_SIZE": "4", "PMI_RANK": "0", "SLURM_MPI_TYPE": "pmi2"}
PMIX = {**STEP, "PMIX_RANK": "0", "SLURM_MPI_TYPE": "pmix"}
HELPERS = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
HYDRA = {**HELPERS, "PMI_SIZE": "4", "PMI_RANK": "0", "MPI_LOCALNRANKS": "2"}
PRTE = {**HELPERS, "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"PATH": "/bin", "SLURM_NTASKS": "8"},
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_SIZE": "1", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_STEP_NUM_TASKS": ""},
        {"PMI_SIZE": "many"},
        # One rank of an mpirun, whose helpers run on all nodes of the job.
        {**HYDRA, "PMI_SIZE": "1"},
        {**PRTE, "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_alone_as_meant(environment):
    check_singleton(1, environment, MPICH)


def test_several_ranks_are_no_singleton():
    for environment in (STEP, HYDRA, PRTE):
        check_singleton(2, environment, MPICH)


WITH_PMI2, WITH_PMIX = "Give srun --mpi=pmi2.", "Give srun --mpi=pmix."
OWN_MPIRUN = "Start it with the mpirun of the MPI library that mpi4py uses."


@pytest.mark.parametrize(
    ("environment", "library", "launcher", "cure"),
    [
        (STEP, MPICH, "srun", WITH_PMI2),
        (STEP, OPEN_MPI, "srun", WITH_PMIX),
        (PMI2, OPEN_MPI, "srun", WITH_PMIX),
        (PMIX, MPICH, "srun", WITH_PMI2),
        (HYDRA, OPEN_MPI, "MPICH's mpirun", OWN_MPIRUN),
        (PRTE, MPICH, "Open MPI's mpirun", OWN_MPIRUN),
        ({"PMI_SIZE": "4"}, OPEN_MPI, "MPICH's mpirun", OWN_MPIRUN),
        (
            STEP,
            "MPI VERSION    : CRAY MPICH version 8.1.25",
            "srun",
            "Give srun --mpi=cray_shasta.",
        ),
        (STEP, "Nobody's MPI 1.0", "srun", "`srun --mpi=list` shows what there is."),
        (PMIX, OPEN_MPI, "srun", "the versions do not fit"),
    ],
)
def test_the_first_process_is_told_one_cure(environment, library, launcher, cure):
    with pytest.raises(UnsupportedError) as caught:
        check_singleton(1, environment, library)
    text = str(caught.value)
    assert text.startswith(launcher)
    assert "started 4 processes" in text
    assert cure in text
    cures = (WITH_PMI2, WITH_PMIX, OWN_MPIRUN)
    assert sum(each in text for each in cures) == (cure in cures)
    assert "Release date" not in text  # one line of the library's words is enough


@pytest.mark.parametrize(
    ("environment", "cure"),
    [
        ({**PMI2, "SLURM_PROCID": "3"}, "give srun --mpi=pmix"),
        ({**HYDRA, "PMI_RANK": "3"}, "start it with the mpirun"),
        ({**PRTE, "OMPI_COMM_WORLD_RANK": "3"}, "start it with the mpirun"),
    ],
)
def test_the_others_say_the_cure_in_one_line(environment, cure):
    with pytest.raises(UnsupportedError) as caught:
        check_singleton(1, environment, OPEN_MPI)
    text = str(caught.value)
    assert text.startswith("process 3 of 4 is alone in MPI.COMM_WORLD")
    assert cure in text
    assert len(text) < 160


UUID = "GPU-1f3c0000-aaaa"


@pytest.mark.parametrize(
    "environment",
    [
        # As seen: mpirun in a job with --gpus-per-task=1, and srun --gpu-bind=map_gpu:0.
        {"SLURM_JOB_GPUS": "0,1,2,3", "SLURM_GPUS_ON_NODE": "1", "SLURM_STEP_GPUS": "0"},
        {"SLURM_GPUS_ON_NODE": "4", "SLURM_STEP_GPUS": "0"},
    ],
)
def test_all_ranks_on_one_gpu_of_a_job_that_has_more(environment):
    note = one_gpu_note([UUID] * 4, environment)
    assert note.startswith("all 4 ranks use GPU-1f3c0000, though this job has 4 GPUs here")
    assert "--gpus-per-node=4 alone" in note


@pytest.mark.parametrize(
    ("uuids", "environment"),
    [
        ([UUID] * 4, {}),  # no job
        ([UUID] * 4, {"SLURM_JOB_GPUS": "2", "SLURM_GPUS_ON_NODE": "1"}),
        ([UUID], {"SLURM_GPUS_ON_NODE": "4"}),
        ([UUID, "GPU-2"], {"SLURM_GPUS_ON_NODE": "4"}),
        (["", ""], {"SLURM_GPUS_ON_NODE": "4"}),  # the host backend
    ],
)
def test_where_that_is_as_meant_nothing_is_said(uuids, environment):
    assert one_gpu_note(uuids, environment) is None

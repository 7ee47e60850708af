"""Processes that a rank starts, of a program that imports MPI at its top."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import mpishare
from tests.helpers.launch import run_ranks

WAYS = ("by_process", "by_executor", "by_subprocess")
PROGRAM = """
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

from mpi4py import MPI

import mpishare


def child(window):
    with window as there:
        return MPI.COMM_WORLD.size, there.array.tolist()


def by_process(window):
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=answer, args=(answers, window))
    with mpishare.outside_environment():
        process.start()
    told = answers.get(timeout=60)
    process.join()
    return told


def answer(answers, window):
    answers.put(child(window))


def by_executor(window):
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, context) as executor, mpishare.outside_environment():
        return executor.submit(child, window).result(timeout=60)


def by_subprocess(window):
    code = "import mpishare; from mpi4py import MPI\\n"
    code += f"print((MPI.COMM_WORLD.size, mpishare.attach({window.name!r}).array.tolist()))"
    command, environment = [sys.executable, "-c", code], mpishare.outside_environment()
    return eval(subprocess.check_output(command, env=environment, text=True, timeout=60))


if __name__ == "__main__":
    before = dict(os.environ)
    with mpishare.Node() as node:
        name = f"seven-{node.comm.bcast(os.getpid())}"  # another MPI may run the same
        window = node.allocate(3, "i8", fill=7, name=name)
        if node.is_leader:
            for way in sys.argv[1:]:
                print(way, globals()[way](window), flush=True)
        node.barrier()
    assert dict(os.environ) == before
"""


@pytest.mark.both_mpis
def test_a_child_is_a_job_of_its_own_and_opens_a_window(tmp_path):
    program = tmp_path / "program.py"  # what a spawned child imports again
    program.write_text(PROGRAM)
    result = run_ranks(2, program, args=WAYS, env={"MPISHARE_BACKEND": "host"})
    assert (result.returncode, result.stderr) == (0, ""), result.describe()
    for line, way in zip(result.stdout.splitlines(), WAYS, strict=True):
        assert line == f"{way} (1, [7, 7, 7])", result.describe()


def test_a_child_does_not_hear_of_the_job(monkeypatch) -> None:
    """But of the settings of its user, and of the batch job."""
    job = {"PMI_RANK": "1", "PMIX_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "SLURM_PROCID": "1"}
    kept = {"OMPI_MCA_pml": "ucx", "PMIX_MCA_gds": "hash", "SLURM_JOB_ID": "7", "PATH": "/bin"}
    monkeypatch.setattr(os, "environ", {**job, **kept})
    environment = mpishare.outside_environment()
    assert environment == kept
    with environment as same:
        assert same is environment
        assert os.environ == kept
    assert os.environ == {**kept, **job}


def test_blocks_that_overlap_lose_no_variable(monkeypatch) -> None:
    """Of one thread with one object, and of two threads that leave in the order they came."""
    job = {"PMI_RANK": "1", "PMI_SIZE": "2"}
    monkeypatch.setattr(os, "environ", job.copy())
    environment = mpishare.outside_environment()
    with environment:
        with environment:
            assert os.environ == {}
        assert os.environ == {}
    assert os.environ == job

    first_is_in, second_is_in = threading.Event(), threading.Event()

    def first() -> None:
        with environment:
            first_is_in.set()
            assert second_is_in.wait(30)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(first)
        assert first_is_in.wait(30)
        with mpishare.outside_environment():
            second_is_in.set()
            other.result(30)
            assert os.environ == {}
    assert os.environ == job

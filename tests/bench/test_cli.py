"""``python -m mpishare.bench`` as its users start it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mpishare.bench.cases import default_cases
from tests.helpers.benches import (
    BENCH,
    HOST,
    QUICK,
    WITHOUT_FENCE,
    altered,
    check_all_ok,
    check_rows,
    measured,
    wrong_arms,
)
from tests.helpers.compiled import WHY_NONE
from tests.helpers.launch import OPEN_MPI, ROOT, Result, launcher, run_ranks, run_right

# One rank has memory for 4 KiB, and none for 64 KiB.
LITTLE_MEMORY = altered("""
from mpi4py import MPI
from mpishare.bench import session

available = session.available_nbytes
session.available_nbytes = lambda: 1 << 20 if MPI.COMM_WORLD.rank == 1 else available()
""")

WITH_AN_ERROR = altered("""
fence, calls = mpishare.Window.fence, []

def failing(self, stream=None):
    calls.append(self)
    if self._rank == 1 and len(calls) > 20:
        raise ZeroDivisionError("on purpose")
    fence(self, stream)

mpishare.Window.fence = failing
""")


def bench(n: int, *words: str) -> Result:
    return run_ranks(n, [*BENCH, *words], env=HOST)


@pytest.mark.parametrize(
    ("module", "words", "once"),
    [
        ("mpishare.bench", "list", "allreduce    the sum "),
        ("mpishare.bench", "--help", "usage: mpirun -n 4 python -m mpishare.bench "),
        ("mpishare.info", "--help", "usage:"),
        ("mpishare", "--help", "python -m mpishare.info "),
    ],
)
def test_list_and_help_start_neither_mpi_nor_cupy(module: str, words: str, once: str) -> None:
    program = (
        f"import runpy, sys\nsys.argv = [{module!r}, {words!r}]\n"
        f"try:\n    runpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "found = {'mpi4py.MPI', 'cupy', 'cuda.bindings', 'torch'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    result = run_right(2, program)
    # Not once a rank.
    assert result.stdout.count(once) == 1, result.describe()


def test_wrong_words_end_with_status_2_and_one_message() -> None:
    for words in (["nosuch"], ["--output", "/nonexistent/file"], ["fence", "--width", "2"]):
        result = bench(2, *words)
        assert result.returncode == 2, result.describe()
        assert result.stderr.count("python -m mpishare.bench:") == 1, result.describe()
        assert not result.stdout.strip(), result.describe()
    for words, once in (
        (["mpishare", "nosuch"], "python -m mpishare.bench "),
        (["mpishare.info", "--nosuch"], "python -m mpishare.info:"),
    ):
        result = run_ranks(2, [sys.executable, "-m", *words], env=HOST)
        assert result.returncode == 2, result.describe()
        assert result.stderr.count(once) == 1, result.describe()


@pytest.mark.parametrize("ranks", [1, 3])
def test_json_on_any_number_of_ranks(ranks: int) -> None:
    found = measured(ranks, BENCH, "--max", "4KiB", *QUICK)
    check_rows(found["rows"], ranks)
    assert {row["case"] for row in found["rows"]} == set(default_cases())
    check_all_ok(found["rows"])
    header = found["header"]
    assert header["ranks"] == ranks
    assert header["backend"] == "host"
    assert header["host_code"] == ("python" if WHY_NONE else "compiled")
    assert header["gpus"] == []
    assert {"python", "numpy", "mpi4py", "mpishare"} <= set(header["versions"])
    for key in (
        "mpi_library",
        "hostname",
        "cores",
        "git_revision",
        "driver",
        "mps",
        "links",
        "load",
    ):
        assert key in header, key


def test_output_and_rivals(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    words = ["halo1d", "fence", "--max", "8", "--output", str(file), "--against", "isend,staged"]
    result = run_right(2, BENCH, [*words, *QUICK])
    assert "halo1d: width 1" in result.stdout
    found = json.loads(file.read_text())["rows"]
    arms = {(row["case"], row["arm"]) for row in found}
    own = {("halo1d", f"{kind} fields") for kind in ("window", "private")}
    own |= {("fence", "fence"), ("fence", "node.barrier")}
    assert arms == own | {("halo1d", "isend")}
    assert "the host backend has no baseline staged of these cases" in result.stdout
    # The summary has a line per case.
    *_, title, halo, fence = result.stdout.splitlines()
    assert title.startswith("mpishare's fastest variant against the fastest baseline, back to back")
    assert halo.startswith("halo1d 8 B: ")
    assert fence == "fence  nothing to compare with"


def test_a_run_ends_in_its_time() -> None:
    words = ["fence", "halo1d", "--max", "4KiB", "--against", "isend", "--repeat", "100000"]
    found = measured(2, BENCH, *words, "--seconds", "3")
    assert {row["case"] for row in found["rows"]} | {*found["header"]["left_out"]} == {*words[:2]}
    check_all_ok(found["rows"])


def test_sizes_that_have_no_time_are_left_out() -> None:
    words = ["halo1d", "--max", "512", "--against", "isend", "--seconds", "1e-9"]
    found = measured(2, BENCH, *words)
    assert found["rows"] == []
    left_out = [f"{size} left out: the 1e-09 s of --seconds were over" for size in ("8 B", "512 B")]
    assert found["header"]["left_out"] == {"halo1d": left_out}


def test_an_interrupt_keeps_what_is_finished(tmp_path: Path) -> None:
    output, mpi = tmp_path / "run.json", OPEN_MPI if launcher()[1] == "openmpi" else {}
    words = ["fence", "halo1d", "--iters", "20", "--repeat", "50", "--output", str(output)]
    with subprocess.Popen(
        [launcher()[0], "-n", "2", *BENCH, *words],
        env={**os.environ, **mpi, **HOST, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as job:
        for line in job.stdout:
            if "node.barrier" in line:  # in the table of the first case
                os.killpg(job.pid, signal.SIGINT)
                break
        rest = job.stdout.read()
    assert job.returncode != 0, rest
    assert "Traceback" not in rest, rest
    found = json.loads(output.read_text())
    assert found["header"]["interrupted"] == "halo1d"
    assert {row["case"] for row in found["rows"]} == {"fence"}


def test_all_ranks_leave_out_what_one_of_them_lacks_memory_for() -> None:
    found = measured(3, LITTLE_MEMORY, "halo1d", "--min", "4KiB", "--max", "64KiB", *QUICK)
    assert {row["nbytes"] for row in found["rows"]} == {4096}
    (text,) = found["header"]["left_out"]["halo1d"]
    assert text.startswith("64 KiB left out: ")
    assert "of memory are needed on a node" in text


def test_a_wrong_result_is_status_1_and_no_number() -> None:
    assert wrong_arms(4, WITHOUT_FENCE, "fence") == {"fence"}
    # The checks alone found it.
    unseen = measured(4, WITHOUT_FENCE, "fence", *QUICK, "--no-check")
    assert all(row["ok"] for row in unseen["rows"])


def test_a_rank_that_raises_ends_all() -> None:
    result = run_ranks(3, WITH_AN_ERROR, args=["fence", *QUICK], env=HOST)
    assert not result.timed_out, result.describe()
    assert result.returncode != 0, result.describe()
    assert "ZeroDivisionError: on purpose" in result.stderr, result.describe()
    assert "latency, us" not in result.stdout, result.describe()  # no table


@pytest.mark.parametrize("name", ["MPISHARE_BACKEND", "MPISHARE_ROUTE"])
@pytest.mark.parametrize("module", ["mpishare.bench", "mpishare.info"])
def test_a_wrong_variable_is_one_line_and_status_1(module: str, name: str) -> None:
    result = run_ranks(2, [sys.executable, "-m", module], env={**HOST, name: "foo"})
    assert result.returncode == 1, result.describe()
    assert len(result.stderr.strip().splitlines()) == 1, result.describe()
    assert name in result.stderr


def test_a_report_that_cannot_be_written_is_shown_and_status_1() -> None:
    """A file that is there and takes nothing: a full disk."""
    result = bench(2, "fence", "--iters", "1", "--repeat", "1", "--output", "/dev/full")
    assert result.returncode == 1, result.describe()
    assert "No space left" in result.stderr
    assert "Traceback" not in result.stderr, result.describe()
    assert "fence" in result.stdout

"""``python -m mpishare.bench`` as its users start it."""

import contextlib
import csv
import io
import json
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import pytest

from mpishare.bench.cases import CASES, DEFAULT_CASES
from mpishare.bench.report.rows import COLUMNS
from tests.helpers.compiled import WHY_NONE
from tests.helpers.launch import OPEN_MPI, ROOT, Result, launcher, run_ranks

BENCH = (sys.executable, "-m", "mpishare.bench")
QUICK = ("--iters", "5", "--repeat", "2", "--warmup", "1")
HOST = {"MPISHARE_BACKEND": "host"}
SPINNING = "persistent waitany"  # runs only where every rank has a core

# A fence that orders nothing, on ranks that are never at the same place.
WITHOUT_FENCE = """
import sys, time
import mpishare
from mpishare.bench.cli import main

def fence(self, stream=None):
    time.sleep(0.002 * self._rank)

mpishare.Window.fence = fence
sys.exit(main(sys.argv[1:]))
"""

# One neighbor never gets its face.
WITHOUT_A_FACE = """
import sys
from mpishare.bench.cli import main
from mpishare.bench.problems.ring import PairwiseRing

def store(self):
    self.problem.node.xp.copyto(self.to_left[0], self.problem.fields[0][0])

PairwiseRing.store = store
sys.exit(main(sys.argv[1:]))
"""

# One rank keeps its own numbers, and its own product.
WITHOUT_A_SUM = """
import sys
import mpishare
from mpishare.bench.cli import main

reduce, dot = mpishare.Allreduce.reduce, mpishare.Allreduce.dot

def reduce_but_on_one(self, x, stream=None):
    mine = x.copy()
    reduce(self, x, stream=stream)
    x[...] = mine if self._setup.comm.rank else x

def dot_but_on_one(self, x, y, out, stream=None):
    dot(self, x, y, out, stream=stream)
    out[...] = (x * y).sum() if self._setup.comm.rank else out

mpishare.Allreduce.reduce, mpishare.Allreduce.dot = reduce_but_on_one, dot_but_on_one
sys.exit(main(sys.argv[1:]))
"""

# Consumers that do not wait for a frame, of a producer that is late.
WITHOUT_A_WAIT = """
import sys, time
from mpishare.bench.cli import main
from mpishare.ordering.slots import Get, Put

enter = Put.__enter__

def enter_late(self):
    time.sleep(0.002)
    return enter(self)

Get._find_sent = lambda self, number: None
Put.__enter__ = enter_late
sys.exit(main(sys.argv[1:]))
"""

# One rank has memory for 4 KiB, and none for 64 KiB.
LITTLE_MEMORY = """
import os, sys
from mpi4py import MPI
from mpishare.bench import session
from mpishare.bench.cli import main

available = session._available_nbytes
session._available_nbytes = lambda: 1 << 20 if MPI.COMM_WORLD.rank == 1 else available()
sys.exit(main(sys.argv[1:]))
"""

# The ghosts of a solve never come.
WITHOUT_GHOSTS = """
import sys
import mpishare
from mpishare.bench.cli import main

class Deaf(mpishare.HaloExchange):
    def start(self, *fields, stream=None):
        pass

    def wait(self, stream=None):
        pass

mpishare.HaloExchange = Deaf
sys.exit(main(sys.argv[1:]))
"""

WITH_AN_ERROR = """
import sys
import mpishare
from mpishare.bench.cli import main

fence, calls = mpishare.Window.fence, []

def failing(self, stream=None):
    calls.append(self)
    if self._rank == 1 and len(calls) > 20:
        raise ZeroDivisionError("on purpose")
    fence(self, stream)

mpishare.Window.fence = failing
sys.exit(main(sys.argv[1:]))
"""


def bench(n: int, *words: str, timeout_s: float = 60.0) -> Result:
    return run_ranks(n, [*BENCH, *words], timeout_s=timeout_s, env=HOST)


def is_all_ok(rows: list[dict], ranks: int) -> bool:
    """Whether all arms ran and were right, save what cannot run on so few cores."""
    crowded = ranks > len(os.sched_getaffinity(0))
    return all(row["ok"] == (row["arm"] != SPINNING or not crowded) for row in rows)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_rows(rows: list[dict], ranks: int) -> None:
    for row in rows:
        assert tuple(row) == COLUMNS, row
        assert row["case"] in CASES, row
        assert row["backend"] == "host", row
        assert row["ranks"] == ranks, row
        assert row["clock"] in ("latency", "throughput"), row
        assert isinstance(row["nbytes"], int), row
        of_halo = [row[key] for key in ("n", "width", "fields", "corners")]
        assert (None in of_halo) == (of_halo == [None] * 4) == (not CASES[row["case"]].takes_halo)
        numbers = [row[key] for key in ("min_us", "median_us", "p95_us")]
        if row["ok"]:
            assert all(is_number(number) for number in numbers), row
            assert numbers == sorted(numbers), row
            assert row["count"] > 0, row
            assert row["reason"] is None, row
        else:
            assert numbers == [None] * 3, row
            assert row["gb_per_s"] is None, row
            assert row["reason"], row


@pytest.mark.parametrize(
    ("module", "words", "once"),
    [
        ("mpishare.bench.cli", "list", "bandwidth "),
        ("mpishare.bench.cli", "--help", "usage: mpirun -n 4 python -m mpishare.bench "),
        ("mpishare.info", "--help", "usage:"),
    ],
)
def test_list_and_help_start_neither_mpi_nor_cupy(module: str, words: str, once: str) -> None:
    program = (
        f"import sys\nfrom {module} import main\n"
        f"try:\n    main([{words!r}])\nexcept SystemExit as end:\n    assert not end.code\n"
        "found = {'mpi4py.MPI', 'cupy', 'cuda.bindings'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    result = run_ranks(2, program)
    assert result.returncode == 0, result.describe()
    # Not once a rank.
    assert result.stdout.count(once) == 1, result.describe()


def test_wrong_words_end_with_status_2_and_one_message() -> None:
    for words in (["nosuch"], ["--output", "/nonexistent/file"], ["ring", "--width", "2"]):
        result = bench(2, *words)
        assert result.returncode == 2, result.describe()
        assert result.stderr.count("python -m mpishare.bench:") == 1, result.describe()
        assert not result.stdout.strip(), result.describe()


def test_defaults_are_checked_and_quick() -> None:
    result = bench(4)
    assert result.returncode == 0, result.describe()
    assert result.seconds < 30, result.describe()
    assert result.stdout.startswith("mpishare bench"), result.describe()
    assert "every result checked" in result.stdout, result.describe()
    titles = {line.split(":")[0] for line in result.stdout.splitlines()}
    assert set(CASES) & titles == set(DEFAULT_CASES), result.describe()
    absent = [line for line in result.stdout.splitlines() if "not run" in line]
    assert all(SPINNING in line for line in absent), result.describe()
    assert "Traceback" not in result.stderr, result.describe()


@pytest.mark.parametrize("ranks", [1, 3])
def test_json_on_any_number_of_ranks(ranks: int) -> None:
    result = bench(ranks, "--format", "json", "--max", "4KiB", *QUICK)
    assert result.returncode == 0, result.describe()
    found = json.loads(result.stdout)  # nothing but the report
    check_rows(found["rows"], ranks)
    assert {row["case"] for row in found["rows"]} == set(DEFAULT_CASES)
    if ranks > 1:
        assert is_all_ok(found["rows"], ranks), result.describe()
    else:
        absent = {row["case"] for row in found["rows"] if not row["ok"]}
        assert absent == {"event"}, result.describe()
    header = found["header"]
    assert header["ranks"] == ranks
    assert header["backend"] == "host"
    assert header["host_code"] == ("python" if WHY_NONE else "compiled")
    assert header["gpus"] == []
    assert {"python", "numpy", "mpi4py", "mpishare"} <= set(header["versions"])
    for key in ("mpi_library", "hostname", "cores", "git_revision", "driver", "mps", "links"):
        assert key in header, key


def test_csv_and_output_and_rivals(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    words = ["ring", "fence", "--max", "8", "--format", "csv", "--output", str(file)]
    result = bench(2, *words, "--against", "isend,counters", *QUICK)
    assert result.returncode == 0, result.describe()
    assert not result.stdout.strip(), result.describe()
    found = list(csv.DictReader(io.StringIO(file.read_text())))
    assert tuple(found[0]) == COLUMNS
    arms = {(row["case"], row["arm"]) for row in found}
    assert arms == {
        ("ring", "window pairwise"),
        ("ring", "window fence"),
        ("ring", "isend"),
        ("fence", "fence"),
        ("fence", "node.barrier"),
        ("fence", "counters"),
    }
    # Asked for and not here: a row that says so.
    (reason,) = {row["reason"] for row in found if row["arm"] == "counters"}
    assert "host" in reason


def test_a_run_ends_in_its_time() -> None:
    words = ["fence", "ring", "--max", "4KiB", "--against", "isend", "--repeat", "100000"]
    result = bench(2, *words, "--seconds", "3", "--format", "json")
    assert result.returncode == 0, result.describe()
    assert result.seconds < 20, result.describe()
    found = json.loads(result.stdout)
    assert not found["header"]["left_out"]
    assert is_all_ok(found["rows"], 2)
    # More than one timed block, of five samples each, wherever the machine is not crowded.
    assert any(row["count"] > 5 for row in found["rows"] if row["clock"] == "throughput")


def test_sizes_that_have_no_time_are_left_out() -> None:
    words = ["ring", "--max", "512", "--against", "isend", "--seconds", "1e-9", "--format", "json"]
    result = bench(2, *words)
    assert result.returncode == 0, result.describe()
    found = json.loads(result.stdout)
    assert found["rows"] == []
    left_out = [f"{size} left out: the 1e-09 s of --seconds were over" for size in ("8 B", "512 B")]
    assert found["header"]["left_out"] == {"ring": left_out}


@pytest.mark.parametrize("ranks", [1, 3])
def test_channels(ranks: int) -> None:
    result = bench(ranks, "channel", "--format", "json", "--max", "4KiB", *QUICK)
    assert result.returncode == 0, result.describe()
    rows = json.loads(result.stdout)["rows"]
    check_rows(rows, ranks)
    assert {row["arm"] for row in rows} == {"channel", "window", "send"}
    assert all(row["ok"] == (ranks > 1) for row in rows), result.describe()


def on_terminal(
    command: Sequence[str], stdout: BinaryIO | None = None, *, interrupt_at: bytes = b""
) -> tuple[int, str]:
    """Run a command on a terminal of 80 columns; return its exit status and what was shown.

    `stdout` may go to a file. `interrupt_at`: Ctrl-C once this was shown.
    """
    mpi = OPEN_MPI if launcher()[1] == "openmpi" else {}
    env = {**os.environ, **mpi, **HOST, "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    screen, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    # A session of its own, whose terminal this is: Ctrl-C goes to its foreground.
    attach = "import fcntl, os, sys, termios; fcntl.ioctl(2, termios.TIOCSCTTY, 0); "
    attach += "os.execvp(sys.argv[1], sys.argv[1:])"
    job = subprocess.Popen(
        [sys.executable, "-c", attach, *command],
        stdin=terminal,
        stdout=stdout or terminal,
        stderr=terminal,
        env=env,
        start_new_session=True,
    )
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # what a terminal says at its end
        while chunk := os.read(screen, 4096):
            shown += chunk
            if interrupt_at and interrupt_at in shown:
                interrupt_at = b""
                os.write(screen, b"\x03")
    os.close(screen)
    return job.wait(30), shown.decode(errors="replace")


@pytest.mark.parametrize("ranks", [0, 2], ids=["alone", "mpirun"])
def test_a_bar_on_stderr_where_a_person_sees_it(tmp_path: Path, ranks: int) -> None:
    """Under a launcher stderr is a pipe, and the terminal that of the launcher."""
    launch = (launcher()[0], "-n", str(ranks)) if ranks else ()
    words = ["ring", "--max", "8", "--format", "json", *QUICK]
    with (tmp_path / "stdout").open("wb") as out:
        status, shown = on_terminal([*launch, *BENCH, *words], out)
    assert status == 0, shown
    assert "ring 8 B" in shown
    assert json.loads((tmp_path / "stdout").read_text())["rows"]


def test_no_bar_where_nobody_sees_it() -> None:
    result = bench(2, "ring", "--max", "8", *QUICK)
    assert result.stderr == "", result.describe()
    assert "\x1b" not in result.stdout, result.describe()


# As scripts/bench starts the ranks.
INTERRUPTIBLE = f'set -euo pipefail; source {ROOT}/scripts/lib/env.sh; interruptible "$@"'


@pytest.mark.parametrize("is_script", [False, True], ids=["mpirun", "script"])
def test_an_interrupt_keeps_what_is_finished(tmp_path: Path, is_script: bool) -> None:
    mpirun, kind = launcher()
    before = ("bash", "-c", INTERRUPTIBLE, "bench") if is_script else ()
    output = tmp_path / "run.json"
    words = ["fence", "ring", "--iters", "20", "--repeat", "50", "--output", str(output)]
    command = [*before, mpirun, "-n", "2", *BENCH, *words]
    status, shown = on_terminal(command, interrupt_at=b"ring 8 B")
    found = json.loads(output.read_text())
    assert found["header"]["interrupted"] == "ring"
    assert {"fence"} <= {row["case"] for row in found["rows"]} <= {"fence", "ring"}
    assert "Traceback" not in shown, shown
    if kind == "openmpi" and not is_script:
        return  # it ends the ranks itself, and shows nothing any more
    assert status == 130, shown
    lines = [line for line in shown.splitlines() if "mpiexec" not in line]  # what MPICH says
    assert lines[-1].endswith(f"interrupted in ring; {output} has what was finished"), shown
    assert "fence: " in shown  # its line of speed


def test_sizes_without_memory_are_left_out_with_a_word() -> None:
    words = ["ring", "bandwidth", "--min", "1024GiB", "--max", "1024GiB"]
    result = bench(2, *words, "--format", "json", *QUICK)
    assert result.returncode == 0, result.describe()
    found = json.loads(result.stdout)
    assert found["rows"] == []
    assert set(found["header"]["left_out"]) == {"ring", "bandwidth"}
    for (text,) in found["header"]["left_out"].values():
        assert text.startswith("1 TiB left out: "), text
        assert "of memory are needed on a node" in text
    shown = bench(2, *words, *QUICK)
    assert "ring 1 TiB left out: " in shown.stdout, shown.describe()


def test_all_ranks_leave_out_what_one_of_them_lacks_memory_for() -> None:
    words = ["ring", "halo1d", "--min", "4KiB", "--max", "64KiB", "--format", "json"]
    result = run_ranks(3, LITTLE_MEMORY, args=[*words, *QUICK], env=HOST)
    assert result.returncode == 0, result.describe()
    found = json.loads(result.stdout)
    for case in ("ring", "halo1d"):
        assert {row["nbytes"] for row in found["rows"] if row["case"] == case} == {4096}
        (text,) = found["header"]["left_out"][case]
        assert text.startswith("64 KiB left out: ")


def test_a_sum_that_misses_a_rank_is_seen() -> None:
    words = ["allreduce", "dot", "--max", "64KiB", "--format", "json", *QUICK]
    result = run_ranks(2, WITHOUT_A_SUM, args=words, env=HOST)
    assert result.returncode == 1, result.describe()
    for row in json.loads(result.stdout)["rows"]:
        assert row["ok"] == (row["kind"] != "own"), row


@pytest.mark.parametrize(
    ("program", "arms"),
    [(WITHOUT_FENCE, {"fence", "window fence"}), (WITHOUT_A_FACE, {"window pairwise"})],
    ids=["fence", "face"],
)
def test_a_wrong_result_is_status_1_and_no_number(program: str, arms: set[str]) -> None:
    words = ["fence", "ring", "--max", "512", "--format", "json", *QUICK]
    result = run_ranks(4, program, args=words, env=HOST)
    assert result.returncode == 1, result.describe()
    rows = json.loads(result.stdout)["rows"]
    check_rows(rows, 4)
    wrong = [row for row in rows if not row["ok"]]
    assert {row["arm"] for row in wrong} == arms, result.describe()
    assert all(row["reason"].startswith("wrong result") for row in wrong), result.describe()
    if program is WITHOUT_A_FACE:
        return
    # The checks alone found it.
    unseen = run_ranks(4, program, args=[*words, "--no-check"], env=HOST)
    assert unseen.returncode == 0, unseen.describe()
    assert all(row["ok"] for row in json.loads(unseen.stdout)["rows"])


def test_a_frame_that_was_not_waited_for_is_a_wrong_result() -> None:
    words = ["channel", "--max", "4KiB", "--format", "json", *QUICK]
    result = run_ranks(2, WITHOUT_A_WAIT, args=words, env=HOST)
    assert result.returncode == 1, result.describe()
    rows = json.loads(result.stdout)["rows"]
    assert {row["arm"] for row in rows if not row["ok"]} == {"channel"}, result.describe()


SOLVE = ("cg", "--min", "512", "--max", "512", "--repeat", "2", "--format", "json")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_conjugate_gradients(ranks: int) -> None:
    result = bench(ranks, *SOLVE)
    assert result.returncode == 0, result.describe()
    rows = json.loads(result.stdout)["rows"]
    check_rows(rows, ranks)
    assert {row["arm"]: row["ok"] for row in rows} == {
        "calls": True,
        "calls, dot": True,
        "isend": ranks > 1,
    }
    assert {(row["nbytes"], row["clock"]) for row in rows} == {(512, "throughput")}


def test_a_solve_without_ghosts_is_a_wrong_result() -> None:
    result = run_ranks(2, WITHOUT_GHOSTS, args=SOLVE, env=HOST)
    assert result.returncode == 1, result.describe()
    rows = json.loads(result.stdout)["rows"]
    assert {row["arm"] for row in rows if row["wrong"]} == {"calls", "calls, dot"}
    assert {row["arm"] for row in rows if row["ok"]} == {"isend"}


def test_a_rank_that_raises_ends_all() -> None:
    result = run_ranks(3, WITH_AN_ERROR, args=["fence", *QUICK], env=HOST)
    assert not result.timed_out, result.describe()
    assert result.returncode != 0, result.describe()
    assert "ZeroDivisionError: on purpose" in result.stderr, result.describe()
    assert "latency, us" not in result.stdout, result.describe()  # no table
    assert result.seconds < 20, result.describe()


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


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_cases_that_run_by_their_names_alone(ranks: int) -> None:
    cases = ("faces", "inplace", "calls", "fresh")
    words = (*cases, "--max", "4KiB", "--repeat", "2", "--format", "json")
    result = bench(ranks, *words)
    assert result.returncode == 0, result.describe()
    rows = json.loads(result.stdout)["rows"]
    check_rows(rows, ranks)
    assert is_all_ok(rows, ranks), result.describe()
    arms = {case: {row["arm"] for row in rows if row["case"] == case} for case in cases}
    assert arms == {
        "faces": {"last axis", "first axis"},
        "inplace": {"in place", "window fields"},
        "calls": {"2 neighbors, 1 field", "26 neighbors, 16 fields"},
        "fresh": {"new arrays", "arrays in turn", "kept, copied", "kept array", "sendrecv"},
    }


def test_steps_of_jax_with_and_without_the_exchange() -> None:
    pytest.importorskip("jax", reason="JAX is not installed")
    words = ("jax", "--max", "8", "--iters", "2", "--repeat", "1", "--format", "json")
    result = bench(2, *words, "--against", "all")
    assert result.returncode == 0, result.describe()
    rows = {row["arm"]: row for row in json.loads(result.stdout)["rows"]}
    forms = {"loop", "recorded", "unrolled", "padded"}
    expected = forms | {f"{form} alone" for form in forms} | {"exchange called"}
    assert {arm for arm in rows if rows[arm]["ok"]} >= expected, result.describe()
    for arm in set(rows) - expected:
        assert "mpi4jax" in arm
        assert rows[arm]["ok"] or "cannot be imported" in rows[arm]["reason"]

"""Start ranks from a test, with an end that does not depend on them."""

import contextlib
import functools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.helpers.held import SHM

TIMEOUT_S = 90.0  # of a job, which takes seconds where it has a core
GONE_S = 20.0  # for ranks that have lost their mpirun to notice it
ROOT = Path(__file__).resolve().parents[2]
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_btl": "^ofi",  # as scripts/lib/mpi.py, which says why
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
# A rank that waits lets others run, as with Open MPI: jobs have more ranks than there are cores.
MPICH = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
# What a process under an mpirun knows of its job; a job that it starts must not inherit it.
OF_A_JOB = ("PMI_", "PMIX_", "OMPI_COMM_", "OMPI_MCA_ess", "PRTE_MCA_ess", "HYDRA_", "HYDI_")
# Nor this: unbuffered, each argument of a `print` is a write, and the ranks' words mix in a line.
NOT_INHERITED = (*OF_A_JOB, "PYTHONUNBUFFERED")


@dataclass(frozen=True)
class Result:
    """How a job ended; `reports` holds what each rank told through `reporting.report`."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    reports: dict[int, dict]
    timed_out: bool
    survivors: list[str]  # what was still alive when mpirun had ended, killed since

    def describe(self) -> str:
        """Everything, for the message of an assert."""
        return (
            f"exit status {self.returncode} after {self.seconds:.1f} s"
            f"{', timed out' if self.timed_out else ''}, survivors {self.survivors}, "
            f"reports {self.reports}\n-- stdout --\n{self.stdout}\n-- stderr --\n{self.stderr}"
        )


def run_right(
    n: int, program: str | Path | Sequence[str | Path], args: Sequence[str] = (), **options: Any
) -> Result:
    """Run it on the host, unless the options say otherwise, and require that it ends well."""
    given = {"env": {"MPISHARE_BACKEND": "host"}, **options}
    result = run_ranks(n, program, args=args, **given)
    assert result.returncode == 0, result.describe()
    return result


@functools.cache
def launcher() -> tuple[str, str]:
    """The mpirun of this environment, else of PATH, and its kind: "mpich" or "openmpi"."""
    here = f"{Path(sys.executable).parent}{os.pathsep}{Path(sys.prefix) / 'bin'}"
    for path in (here, None):
        found = shutil.which("mpirun", path=path) or shutil.which("mpiexec", path=path)
        if found:
            said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
            is_open = "open mpi" in said.stdout.lower() or "open-mpi" in said.stdout.lower()
            return found, "openmpi" if is_open else "mpich"
    raise RuntimeError("no mpirun beside this Python or on PATH")


def run_ranks(
    n: int,
    program: str | Path | Sequence[str | Path],
    *,
    timeout_s: float = TIMEOUT_S,
    env: Mapping[str, str] | None = None,
    args: Sequence[str] = (),
    extra_mpirun: Sequence[str] = (),
    before: Sequence[str | Path] = (),
    check_survivors: bool = True,
) -> Result:
    """Run `program` on `n` ranks: a Python file, the source of one, or a whole command line.

    At the deadline every rank gets SIGABRT (faulthandler then prints where it hangs), and
    everything that the job started is killed. A process that outlives its mpirun is an
    AssertionError. RANK_WRAPPER, a program, is put before each rank's own, and `before` is what
    runs mpirun.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        work = Path(folder)
        if isinstance(program, str) and "\n" in program:
            (work / "program.py").write_text(program)
            program = work / "program.py"
        if isinstance(program, str | Path):
            program = [sys.executable, program]
        command, variables = started_as(n, [*program, *args], work, env or {}, extra_mpirun, before)
        there = segments()
        result = _run(command, variables, work, timeout_s)
    if result.returncode or result.survivors:  # to look takes 30 ms, and others clean up
        remove_unused(segments() - there)
    if check_survivors and result.survivors and not result.timed_out:
        raise AssertionError(f"processes outlived mpirun\n{result.describe()}")
    return result


def started_as(
    n: int,
    program: Sequence[str | Path],
    work: Path,
    env: Mapping[str, str],
    extra_mpirun: Sequence[str],
    before: Sequence[str | Path],
) -> tuple[list[str], dict[str, str]]:
    """Return the command line of a job and its environment, by which its processes are found."""
    mpirun, kind = launcher()
    job = [*filter(None, [os.environ.get("RANK_WRAPPER")]), *map(str, program)]
    options = ["--bind-to", "none"] if kind == "openmpi" else []
    command = [*map(str, before), mpirun, *options, *extra_mpirun, "-n", str(n), *job]
    variables = {k: v for k, v in os.environ.items() if not k.startswith(NOT_INHERITED)}
    variables = {**(OPEN_MPI if kind == "openmpi" else MPICH), **variables}
    variables |= {"REPORT_DIR": str(work), "PYTHONFAULTHANDLER": "1"}
    paths = [str(ROOT), *filter(None, [variables.get("PYTHONPATH")])]
    variables["PYTHONPATH"] = os.pathsep.join(paths)
    return command, {**variables, **env}


def start_job(
    command: Sequence[str], env: Mapping[str, str], out: IO[str], err: IO[str]
) -> subprocess.Popen:
    """Start a job in a session of its own."""
    return subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
    )


def print_where(work: Path) -> None:
    """Let each rank of the job print where it is, and end."""
    for pid, words in processes_of(work):
        if "python" in Path(words[0]).name:
            send_signal(pid, signal.SIGABRT)


def _run(command: list[str], env: dict[str, str], work: Path, timeout_s: float) -> Result:
    begin = time.monotonic()
    timed_out = False
    with (work / "stdout").open("w") as out, (work / "stderr").open("w") as err:
        process = start_job(command, env, out, err)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
            print_where(work)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
        finally:
            seconds = time.monotonic() - begin
            survivors: list[tuple[int, list[str]]] = []

            def are_gone() -> bool:
                survivors[:] = processes_of(work)
                return not survivors

            wait_until(are_gone, 0 if timed_out else GONE_S)
            for pid, _ in survivors:
                send_signal(pid, signal.SIGKILL)
            if process.poll() is None:  # where /proc does not tell, its group does
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
            if survivors:  # to look takes milliseconds, and most jobs have ended by themselves
                wait_until(lambda: not list(processes_of(work)), 5)
    reports = {int(f.stem): json.loads(f.read_text()) for f in work.glob("[0-9]*.json")}
    return Result(
        process.returncode,
        (work / "stdout").read_text(errors="replace"),
        (work / "stderr").read_text(errors="replace"),
        seconds,
        dict(sorted(reports.items())),
        timed_out,
        [f"{pid} {' '.join(words)}" for pid, words in survivors],
    )


def processes_of(work: Path) -> Iterator[tuple[int, list[str]]]:
    """Every process of the job, in whatever group or session: known by its REPORT_DIR."""
    mark = f"REPORT_DIR={work}\0".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone, or another user's
            if mark in (entry / "environ").read_bytes() + b"\0":
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                yield int(entry.name), words


def send_signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def wait_until(condition: Callable[[], object], seconds: float) -> bool:
    """Wait until a condition holds; return whether it came to that."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def segments() -> set[Path]:
    """The files of MPICH and of Open MPI in /dev/shm; ranks that are killed leave them there."""
    return {*SHM.glob("mpich_shm_*"), *SHM.glob("sm_segment.*")}


def remove_unused(files: set[Path]) -> None:
    """Remove files that no process has open or mapped: others belong to another job."""
    if not files:
        return
    used = "\n".join(text for each in Path("/proc").glob("[0-9]*") for text in _files_of(each))
    for file in files:
        if str(file) not in used:
            file.unlink(missing_ok=True)


def _files_of(process: Path) -> Iterator[str]:
    """What it has open, then what it has mapped: a file is open from its making to its mapping."""
    with contextlib.suppress(OSError):  # gone, or another user's
        for file in (process / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                yield str(file.readlink())
        yield (process / "maps").read_text(errors="replace")

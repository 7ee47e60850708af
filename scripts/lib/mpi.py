"""The MPI that is there already: find its launcher, and try it.

A library and a launcher that do not belong together start N jobs of one rank, so that only a
trial tells.
"""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# For the mpirun of Open MPI alone; every other MPI ignores them.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_osc": "^ucx",  # its component prints a warning for each window
    "OMPI_MCA_btl": "^ofi",  # libfabric looks for networks for a second in MPI_Init
}
# More ranks than cores is normal on one machine; in a batch job the scheduler says what fits.
if not {"SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"} & set(os.environ):
    OPEN_MPI["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"


def say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)


def launchers() -> list[Path]:
    """Every mpirun that is not ours, in the order to try: PATH first, then beside Python."""
    folders = [*os.environ.get("PATH", "").split(os.pathsep), str(Path(sys.prefix) / "bin")]
    ours = [str(ROOT / name) for name in (".venv/", ".venv-")]
    found = []
    for name in ("mpirun", "mpiexec"):
        for folder in folders:
            launcher = Path(folder) / name
            usable = folder and os.access(launcher, os.X_OK) and launcher.is_file()
            if usable and not any(str(launcher).startswith(prefix) for prefix in ours):
                found.append(launcher)
    return list(dict.fromkeys(found))[:3]


def trial(python: Path, launcher: Path) -> tuple[str, dict[str, str]] | str:
    """Start two ranks: (kind, variables it needs) when they find each other, else the reason."""
    code = (
        "from mpi4py import MPI\n"
        "kind = 'openmpi' if 'Open MPI' in MPI.Get_library_version() else 'mpich'\n"
        "if MPI.COMM_WORLD.rank == 0: print(f'{MPI.COMM_WORLD.size} {kind}', flush=True)\n"
    )
    reason = ""
    prefix = launcher.resolve().parent.parent
    for libraries in (None, prefix / "lib", prefix / "lib64"):
        extra = {} if libraries is None else {"MPI4PY_LIBMPI": str(libraries)}
        if libraries is not None and not any(libraries.glob("libmpi.so*")):
            continue
        with subprocess.Popen(
            [launcher, "-n", "2", python, "-c", code],
            env={**os.environ, **OPEN_MPI, **extra},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that a hanging one can be killed whole
        ) as process:
            try:
                out, err = process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                out, err = "", "no answer within 60 s"
        words = out.split()
        if process.returncode == 0 and words[:1] == ["2"]:
            return words[1], extra
        last = (err.strip() or out.strip() or "no output").splitlines()[-1]
        reason = reason or f"{launcher} started no two ranks with mpi4py: {last}"
    return reason


def shell_lines(python: Path, launcher: Path, kind: str, variables: dict[str, str]) -> list[str]:
    """What the scripts source."""
    values = {"PYTHON": str(python), "MPIRUN": str(launcher), "MPI_KIND": kind}
    exported = {**(OPEN_MPI if kind == "openmpi" else {}), **variables}
    return [
        *(f"{name}={shlex.quote(value)}" for name, value in values.items()),
        *(f"export {name}={shlex.quote(value)}" for name, value in exported.items()),
        f"export PATH={shlex.quote(str(python.parent))}:$PATH",
    ]


def as_is() -> list[str]:
    """The same for the Python that runs this, with nothing installed."""
    python = Path(sys.executable)
    for launcher in launchers():
        result = trial(python, launcher)
        if not isinstance(result, str):
            return shell_lines(python, launcher, *result)
        say(f"not used: {result}")
    raise SystemExit("setup: no mpirun that works with this Python's mpi4py")

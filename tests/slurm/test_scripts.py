"""scripts/slurm: each script runs a program to its end, with both MPIs, and passes signals on."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.launch import ROOT
from tests.slurm.cluster import NODES, Cluster
from tests.slurm.conftest import Mpi
from tests.tools.test_with_mps import CONTROL, SMI

pytestmark = pytest.mark.timeout(120)
SCRIPTS = ROOT / "scripts" / "slurm"
PROGRAM = "scripts/examples/02_halo_1d.py"
ONE = ("--ntasks-per-node=1", "--gpus-per-node=1")
# Hears a signal, as programs do that write a checkpoint.
HEARS = """
import signal, time
from mpi4py import MPI
import mpishare

heard = []


def hear(*_):
    heard.append(1)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # SLURM may send it twice


signal.signal(signal.SIGUSR1, hear)
with mpishare.Node() as node:
    if MPI.COMM_WORLD.rank == 0:
        print("ready", flush=True)
    while not MPI.COMM_WORLD.allreduce(len(heard)):
        time.sleep(0.05)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # another rank may have heard it first
if MPI.COMM_WORLD.rank == 0:
    print("checkpoint", flush=True)
"""


@pytest.fixture(scope="session")
def hears(folder: Path) -> Path:
    """The program that ends well when it hears SIGUSR1."""
    file = folder / "hears.py"
    file.write_text(HEARS)
    return file


@pytest.mark.parametrize(
    ("script", "ranks"), [("one-node", 2), ("nodes", 4), ("mpirun", 2)], ids=str
)
def test_it_reports_and_runs_the_program(free: Cluster, mpi: Mpi, script: str, ranks: int):
    nodes = 1 if script == "one-node" else 2
    few = (f"--ntasks-per-node={ranks // nodes}", f"--gpus-per-node={ranks // nodes}")
    job = free.sbatch(*few, SCRIPTS / f"{script}.sbatch", PROGRAM, VENV=mpi.environment)
    done = free.wait(job)
    assert done.status == 0, done.describe()
    assert f"{ranks} ranks, 200 steps" in done.output, done.describe()
    assert done.output.count("right") == 1
    # info, before: one report per node.
    assert done.output.count("backend host") == nodes, done.describe()
    assert "CANCELLED" not in done.output
    assert done.state == "COMPLETED"


def test_every_script_is_run_here():
    text = Path(__file__).read_text()
    for script in SCRIPTS.glob("*.sbatch"):
        assert f'"{script.stem}"' in text or f'"{script.name}"' in text, script


@pytest.mark.parametrize("script", ["nodes", "mpirun"])
def test_a_signal_for_the_script_reaches_the_ranks(
    free: Cluster, mpi: Mpi, hears: Path, script: str
):
    """So a program can write a checkpoint, and end well."""
    job = free.sbatch(*ONE, SCRIPTS / f"{script}.sbatch", hears, VENV=mpi.environment)
    free.until_said(job, "ready")
    free.cancel(job, "--batch", "--signal=USR1")
    done = free.wait(job)
    assert "checkpoint" in done.output, done.describe()
    assert done.status == 0, done.describe()


@pytest.fixture(scope="session")
def mps(folder: Path) -> Path:
    """What stands for the driver's tools, as in the test of mpishare.mps."""
    tools = folder / "mps"
    tools.mkdir()
    for name, text in (("nvidia-cuda-mps-control", CONTROL), ("nvidia-smi", SMI)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tools / "program.py").write_text(
        "import os, pathlib\n"
        "from mpi4py import MPI\n"
        "folder = pathlib.Path(os.environ['CUDA_MPS_PIPE_DIRECTORY'])\n"
        "served = (folder / 'nvidia-cuda-mps-control.pid').exists()\n"
        "every = MPI.COMM_WORLD.gather((served, os.uname().nodename, str(folder)))\n"
        "if MPI.COMM_WORLD.rank == 0:\n"
        "    print(sorted(set(every)))\n"
    )
    return tools


def with_tools(free: Cluster, mpi: Mpi, mps: Path) -> dict[str, str]:
    path = f"{mps}:{free.environment['PATH']}"
    return {"VENV": mpi.environment, "PATH": path, "FAKE": str(mps)}


@pytest.mark.parametrize(("script", "nodes"), [("mps", 1), ("mps-nodes", 2)])
def test_every_node_has_a_daemon_that_ends_with_the_job(
    free: Cluster, mpi: Mpi, mps: Path, script: str, nodes: int
):
    script, program = SCRIPTS / f"{script}.sbatch", mps / "program.py"
    job = free.sbatch("--ntasks-per-node=2", script, program, **with_tools(free, mpi, mps))
    done = free.wait(job)
    assert done.status == 0, done.describe()
    (line,) = [line for line in done.output.splitlines() if line.startswith("[(")]
    assert line.count("True") == nodes, done.describe()
    assert line.count("False") == 0
    for node in NODES[:nodes]:
        assert node in line
        assert free.on(node, "ls -d /tmp/mps-* 2>/dev/null || true") == ""
        assert free.on(node, "pgrep -fx 'sleep 100' || true") == ""


def test_mps_on_several_nodes_passes_a_signal_on(free: Cluster, mpi: Mpi, mps: Path, hears: Path):
    script = SCRIPTS / "mps-nodes.sbatch"
    job = free.sbatch("--ntasks-per-node=1", script, hears, **with_tools(free, mpi, mps))
    free.until_said(job, "ready")
    free.cancel(job, "--batch", "--signal=USR1")
    done = free.wait(job)
    assert "checkpoint" in done.output, done.describe()
    assert done.status == 0, done.describe()
    for node in NODES:
        assert free.on(node, "ls -d /tmp/mps-* 2>/dev/null || true") == ""


@pytest.fixture
def bare(folder: Path, mpi: Mpi) -> Path:
    """An environment with all packages and no MPI."""
    bare = folder / f"bare-{mpi.name}"
    if not bare.exists():
        subprocess.run([mpi.python, "-m", "venv", "--without-pip", bare], check=True)
        (site,) = bare.glob("lib/python*/site-packages")
        (packages,) = Path(mpi.environment).glob("lib/python*/site-packages")
        # addsitedir, since the packages' own .pth files are needed.
        (site / "packages.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    return bare


def test_modules_bring_the_mpi(free: Cluster, mpi: Mpi, bare: Path, folder: Path):
    """`modules.sbatch`, with the name of the module changed, as its user does."""
    modules = folder / "modules"
    modules.mkdir(exist_ok=True)
    environment = Path(mpi.environment)
    (modules / mpi.name).write_text(
        f"#%Module\nprepend-path PATH {environment}/bin\n"
        f"prepend-path LD_LIBRARY_PATH {environment}/lib\n"
        + "".join(
            f"setenv {name} {value}\n" for name, value in free.environment.items() if "OMPI" in name
        )
    )
    system = "/usr/share/modules/modulefiles"
    for node in NODES:
        free.on(node, f"mountpoint -q {system} || mount --bind {modules} {system}")
    script = folder / "modules.sbatch"
    shutil.copy(SCRIPTS / "modules.sbatch", script)
    text = script.read_text()
    assert "module load openmpi " in text
    script.write_text(text.replace("module load openmpi ", f"module load {mpi.name} "))
    # SLURM_CONF is where nobody would look; all else of this shell is gone.
    exported = f"--export=VENV={bare},SLURM_CONF={free.conf}"
    done = free.wait(free.sbatch(*ONE, exported, script, PROGRAM))
    assert done.status == 0, done.describe()
    assert "2 ranks, 200 steps" in done.output, done.describe()
    without = free.srun(bare / "bin/python", "-c", "from mpi4py import MPI")
    assert without.status != 0, "the environment has an MPI of its own"

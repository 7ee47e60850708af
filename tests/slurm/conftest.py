"""The cluster that tests share, and the two MPIs that each program is run with."""

import inspect
import os
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slurm.cluster import COMMON, Cluster, share_folders

ENDS = """
import os, signal, sys, time
import numpy as np
from mpi4py import MPI
import mpishare

how, timeout_s = sys.argv[1], float(sys.argv[2])
world = MPI.COMM_WORLD
node = mpishare.Node(timeout_s=timeout_s)
u = np.zeros(66)
halo = mpishare.HaloExchange(world, u, width=1, dims=(world.size,), periods=(True,), node=node)
step = 0
while True:
    halo.exchange(u)
    step += 1
    if step == 50 and world.rank == 0:
        print("running", flush=True)
    while step == 100 and how == "never":
        time.sleep(0.1)
    if step == 100 and world.rank == world.size - 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            raise ValueError("no such thing")
"""

KINDS = {"mpich": "pmi2", "openmpi": "pmix"}
# Under srun a fence of PMIx may let some ranks go early, and what they send kills one that is still
# in MPI_Init (Open MPI's issues 11438 and 12495): so dies each rank that is held back in the fence.
DIES_IN_INIT = ("mca_pml_ob1_recv_frag_callback_match", "ompi_mpi_init")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Run a test once more where Open MPI itself died before the program began, and say so."""
    try:
        return (yield)
    except AssertionError as error:
        if not all(name in str(error) for name in DIES_IN_INIT):
            raise
        print(f"once more, a rank died inside Open MPI's MPI_Init:\n{error}", file=sys.stderr)
    names = inspect.signature(pyfuncitem.obj).parameters
    return pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}) or True


@dataclass(frozen=True)
class Mpi:
    """One MPI: its environment, and the protocol that it speaks with srun."""

    name: str
    python: Path
    protocol: str

    @property
    def environment(self) -> str:
        """The folder of the virtual environment."""
        return str(self.python.parents[1])


@pytest.fixture(params=KINDS)
def mpi(request: pytest.FixtureRequest) -> Mpi:
    """Each of both MPIs."""
    return mpi_called(request.param)


@pytest.fixture
def mpich() -> Mpi:
    """One of both, where they do the same."""
    return mpi_called("mpich")


@pytest.fixture
def other_mpi(mpi: Mpi) -> Mpi:
    """The one of the two that `mpi` is not."""
    (name,) = set(KINDS) - {mpi.name}
    return mpi_called(name)


def mpi_called(name: str) -> Mpi:
    """One of the two."""
    return Mpi(name, Path(os.environ[f"TEST_SLURM_{name.upper()}"]), KINDS[name])


@pytest.fixture(scope="session")
def folder() -> Path:
    """A folder that front and nodes share."""
    share_folders()
    return COMMON


@pytest.fixture(scope="session")
def free(folder: Path) -> Generator[Cluster]:
    """The cluster, which lets each job touch what it wants."""
    cluster = Cluster(folder / "free")
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def ends(folder: Path) -> Path:
    """A program whose last rank is killed or raises; or that never ends."""
    file = folder / "ends.py"
    file.write_text(ENDS)
    return file

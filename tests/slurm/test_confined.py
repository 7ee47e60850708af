"""Jobs that SLURM keeps to their memory, their devices and a /dev/shm of their own."""

from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.conftest import Mpi

pytestmark = pytest.mark.timeout(120)
LARGE = """
import mpishare
from mpi4py import MPI

with mpishare.Node() as node:
    node.allocate(60 << 20, dtype="u1").close()
    try:
        node.allocate(int(2e9), dtype="u1", owner=0)
    except mpishare.UnsupportedError as error:
        print(error, flush=True)
    except mpishare.PeerError as error:
        print("told", error.failures, flush=True)
    node.barrier()
"""
NAMES = "import os; print(len(os.listdir('/dev/shm')), os.stat('/dev/shm').st_dev)"


@pytest.mark.parametrize("size", ["900M"])
def test_memory_is_refused_before_the_kernel_kills(
    confined: Cluster, mpi: Mpi, folder: Path, size: str
):
    program = folder / "large.py"
    program.write_text(LARGE)
    words = (f"--mpi={mpi.protocol}", "-N1", "-n2", f"--mem={size}", mpi.python, program)
    done = confined.srun(*words)
    assert done.status == 0, done.describe()
    assert "may use 900 MiB of memory on this machine" in done.output, done.describe()
    assert "--mem=SIZE in SLURM" in done.output
    assert "(control group /slurm" in done.output, done.describe()
    assert "told {0: 'UnsupportedError" in done.output, done.describe()
    assert "oom" not in done.error.lower(), done.describe()


def test_steps_of_a_job_share_its_own_shm(confined: Cluster, mpi: Mpi):
    if not confined.has_containers:
        pytest.skip("the repository lies in /tmp, which job_container/tmpfs hides")
    make = "import mpishare; node = mpishare.Node(); print(node.size); node.close()"
    srun = f"srun -N1 -n2 --mpi={mpi.protocol} {mpi.python}"
    one = f"srun -N1 -n1 {mpi.python}"
    text = f'set -e\ntouch /dev/shm/kept\n{srun} -c "{make}"\n{one} -c "{NAMES}"'
    done = confined.wait(confined.write(text, "-N1", "-n2"))
    assert done.status == 0, done.describe()
    *sizes, names, device = done.words
    assert sizes == ["2", "2"], done.describe()
    (node,) = {confined.field(done.number, "BatchHost")}
    # What the batch script left is there for its steps, and not outside the job.
    assert int(names) >= 1
    assert confined.on(node, "ls /dev/shm/kept 2>/dev/null || true") == ""
    assert device != confined.on(node, "stat -c %d /dev/shm").strip()

"""What goes wrong in jobs, and what SLURM does to them, with both MPIs."""

from pathlib import Path

import pytest

from mpishare.errors import late_elsewhere
from tests.slurm.cluster import NODES, Cluster, Job, programs_lines
from tests.slurm.conftest import Mpi

pytestmark = pytest.mark.timeout(120)
NO_HELP = "--kill-on-bad-exit=0"  # of the launcher
MAKE = "import mpishare; node = mpishare.Node(); print(node.size); node.close()"


@pytest.mark.parametrize("given", ["none", "other"])
def test_the_wrong_protocol_is_answered_by_one_cure(free: Cluster, mpi: Mpi, given: str):
    other = {"pmi2": "pmix", "pmix": "pmi2"}[mpi.protocol]
    option = f"--mpi={other if given == 'other' else given}"
    done = free.srun(option, "-N2", "--ntasks-per-node=2", NO_HELP, mpi.python, "-c", MAKE)
    assert done.status != 0, done.describe()
    if (mpi.name, given) == ("mpich", "other"):
        # It ends in MPI_Init, before mpishare can say anything.
        assert "unsupported PMI version PMIx" in done.error, done.describe()
        return
    lines = done.error.splitlines()
    full = [line for line in lines if "UnsupportedError: srun started 4 processes" in line]
    assert full, done.describe()
    assert all(line.endswith(f"Give srun --mpi={mpi.protocol}.") for line in full), done.describe()
    brief = [line for line in lines if "UnsupportedError: process" in line]
    numbers = {line.partition(" of 4 is alone")[0][-1] for line in brief}
    assert numbers == {"1", "2", "3"}, done.describe()
    assert all(f"give srun --mpi={mpi.protocol}" in line for line in brief)
    assert f"--mpi={other}" not in done.error, done.describe()
    assert done.error.count("Traceback") == 4, done.describe()  # one of each process


def test_the_wrong_mpirun_is_answered_by_the_right_one(free: Cluster, mpi: Mpi, other_mpi: Mpi):
    text = f'{mpi.environment}/bin/mpirun {other_mpi.python} -c "{MAKE}"'
    done = free.wait(free.write(text, "-N2", "--ntasks-per-node=1"))
    assert done.status != 0, done.describe()
    assert "--mpi=" not in done.output, done.describe()
    if other_mpi.name == "mpich":  # as above
        assert "unsupported PMI version PMIx" in done.output, done.describe()
    else:
        assert "with the mpirun of the MPI library that mpi4py uses" in done.output, done.describe()


CHILD = """
import os, subprocess, sys
from mpi4py import MPI
import mpishare

if sys.argv[1:]:
    with mpishare.Node() as node:
        print(node.size, os.environ["SLURM_JOB_ID"])
elif MPI.COMM_WORLD.rank == 0:
    subprocess.run([sys.executable, __file__, "child"], env=mpishare.outside_environment())
MPI.COMM_WORLD.Barrier()
"""


def test_a_child_of_a_rank_is_outside_of_its_step(free: Cluster, mpi: Mpi, folder: Path):
    program = folder / "child.py"
    program.write_text(CHILD)
    job = free.write(f"srun -n2 --mpi={mpi.protocol} {mpi.python} {program}", "-N1", "-n2")
    done = free.wait(job)
    assert (done.status, done.output) == (0, f"1 {job}\n"), done.describe()


def test_array_jobs_side_by_side(free: Cluster, mpi: Mpi):
    """Two jobs on one node have nodes of their own."""
    text = f'srun --mpi={mpi.protocol} {mpi.python} -c "{MAKE}"'
    job = free.write(text, "-N1", "-n2", "--array=0-1", f"--output={free.folder}/%A_%a.out")
    free.wait(job)
    for number in (0, 1):
        said = Path(free.folder, f"{job}_{number}.out").read_text()
        assert programs_lines(said) == ["2", "2"], said


def test_steps_that_overlap(free: Cluster, mpi: Mpi):
    step = f'srun --overlap -n2 --mpi={mpi.protocol} {mpi.python} -c "{MAKE}"'
    done = free.wait(free.write(f"set -e\n{step} & first=$!\n{step}\nwait $first", "-N1", "-n2"))
    assert done.status == 0, done.describe()
    assert done.words == ["2"] * 4, done.describe()


def test_scancel_leaves_nothing(free: Cluster, mpi: Mpi, ends: Path):
    step = f"exec srun --mpi={mpi.protocol} {mpi.python} {ends} never 60"
    job = free.write(step, "-N2", "--ntasks-per-node=1")
    free.until_said(job, "running")
    free.cancel(job)
    done = free.wait(job, 20)
    assert done.state == "CANCELLED", done.describe()
    assert "Traceback" not in done.output, done.describe()
    nothing_is_left(free)


def nothing_is_left(free: Cluster) -> None:
    """No process of a job, and nothing of mpishare in /dev/shm."""
    for node in NODES:
        assert free.on(node, "ls /dev/shm | grep ^mpishare || true") == ""
        assert free.on(node, "pgrep -f [e]nds.py || true") == ""


def ended_on_two_nodes(free: Cluster, mpi: Mpi, *words: object) -> Job:
    """A job on both nodes, which must fail at once, and leave nothing."""
    done = free.srun(f"--mpi={mpi.protocol}", "-N2", *words)
    assert done.status != 0
    nothing_is_left(free)
    return done


def test_a_killed_rank_of_a_node_is_told_to_its_mates(free: Cluster, mpi: Mpi, ends: Path):
    """They end the job, with those of the other node."""
    words = ("--ntasks-per-node=2", NO_HELP, mpi.python, ends, "killed", 60)
    done = ended_on_two_nodes(free, mpi, *words)
    if mpi.name == "mpich":  # PMIx ends the job before anybody speaks
        assert "rank 1 of 2 died (seen by rank 0)" in done.error, done.describe()


def test_the_only_rank_of_a_node_raises(free: Cluster, mpi: Mpi, ends: Path):
    """And nobody helps: neither srun nor `python -m mpi4py`."""
    words = ("--ntasks-per-node=1", NO_HELP, mpi.python, ends, "raises", 60)
    done = ended_on_two_nodes(free, mpi, *words)
    assert "ValueError: no such thing" in done.error, done.describe()
    # That it was this rank which ended the other is not always to be read: srun may be over before.


def _late(timeout_s: float) -> str:
    """What a `PeerTimeout` tells of rank 1, without the call and the rank that waits."""
    text = str(late_elsewhere("", [1], [], timeout_s, "", {}))
    return text.removeprefix(" failed: ").partition(" (")[0]


def test_the_only_rank_of_a_node_is_killed(free: Cluster, mpi: Mpi, ends: Path):
    """PMIx tells; with PMI2 the deadline ends the wait, and names the remedies."""
    timeout_s = 60 if mpi.name == "openmpi" else 4
    words = ("--ntasks-per-node=1", NO_HELP, mpi.python, ends, "killed", timeout_s)
    done = ended_on_two_nodes(free, mpi, *words)
    # MPICH itself is at times (1 of 12) killed by the connection that breaks, before the deadline.
    if mpi.name == "mpich" and "Segmentation fault" not in done.error:
        assert _late(4) in done.error
        assert "srun --kill-on-bad-exit=1" in done.error, done.describe()
        assert "python -m mpi4py" in done.error


def test_the_only_rank_of_a_node_is_killed_and_srun_helps(free: Cluster, mpi: Mpi, ends: Path):
    """As in scripts/slurm."""
    words = ("--ntasks-per-node=1", "--kill-on-bad-exit=1", mpi.python, ends, "killed", 60)
    done = ended_on_two_nodes(free, mpi, *words)
    assert _late(60) not in done.error, done.describe()

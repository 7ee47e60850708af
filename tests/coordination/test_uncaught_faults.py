"""What is printed when an exception of one rank ends the job, as a user starts it."""

import re
import sys
from pathlib import Path

import pytest

from tests.helpers import launch
from tests.helpers.launch import launcher, run_ranks

PROLOGUE = """\
import mpishare
node = mpishare.Node(backend="host")
def broken():
    return {}["no such key"]
"""
PROGRAMS = {
    "a callable given to share": "node.share(broken, owner=1)",
    "an argument of one rank": "node.allocate(-1 if node.rank == 1 else 4)",
    "its own work, with no `with`": "node.rank == 1 and broken()\nnode.barrier()",
    "its own work, in a `with`": "with node:\n    node.rank == 1 and broken()\n    node.barrier()",
}
ERRORS = {"an argument of one rank": "ValueError: Node.allocate failed: shape must be"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_its_line_names_the_place(tmp_path, name):
    error = ERRORS.get(name, "KeyError: 'no such key'")
    program = tmp_path / "program.py"
    program.write_text(PROLOGUE + PROGRAMS[name] + "\n")
    result = run_ranks(4, [sys.executable, "-m", "mpi4py", program])
    assert result.returncode != 0, result.describe()
    lines = result.stderr.splitlines()
    words = re.compile(rf"mpishare: rank 1: .*program.py, line \d+: {error}.*")
    assert sum(words.fullmatch(line) is not None for line in lines) == 1, result.describe()
    # The tracebacks of the others end with what they heard.
    heard = [line for line in lines if line.startswith("mpishare.errors.PeerError: ")]
    assert len(heard) == 3, result.describe()
    for line in heard:
        assert re.search("rank 1( has left)?: (KeyError|ValueError: shape must be)", line), line


BESIDE = """
import sys, time
import mpishare
import numpy as np
from mpi4py import MPI
world, x = MPI.COMM_WORLD, np.ones(3)
node = mpishare.Node(backend="host")
node.barrier()
if world.rank == 1:
    raise ValueError("negative density")
"""
WAITS = {
    "allreduce": "world.allreduce(1)",
    "bcast": "world.bcast(None, root=1)",
    "Barrier": "world.Barrier()",
    "Recv": "world.Recv(x, 1)",
    "NumPy": "while True:\n    np.linalg.svd(np.eye(200))",
    "sleep": "time.sleep(1000)",
    "one of two waits in mpishare": "node.barrier() if world.rank else world.Barrier()",
    "it was caught": "try:\n    node.barrier()\nexcept mpishare.PeerError:\n    world.Barrier()",
}
STARTS = {"mpi4py": ("-m", "mpi4py"), "python": ()}
WITHOUT_CLEANUP = {"mpich": [[], ["-disable-auto-cleanup"]], "openmpi": [[]]}
ENDS = {
    "ValueError": 'raise ValueError("negative density")',
    "SystemExit": 'with node: sys.exit("negative density")',
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    ("wait", "error"), [*((wait, "ValueError") for wait in WAITS), ("Barrier", "SystemExit")]
)
def test_an_exception_ends_the_job_wherever_the_others_are(tmp_path, wait, error, start):
    program = tmp_path / "program.py"
    source = BESIDE.replace(ENDS["ValueError"], ENDS[error])
    program.write_text(source + WAITS[wait] + "\n")
    line = 1 + source.split("\n").index(f"    {ENDS[error]}")
    words = f"mpishare: rank 1: {program}, line {line}: {error}: negative density"
    for options in WITHOUT_CLEANUP[launcher()[1]]:
        command = [sys.executable, *STARTS[start], program]
        result = run_ranks(3, command, extra_mpirun=options)
        assert not result.timed_out, result.describe()
        assert result.returncode != 0, result.describe()
        assert words in result.stderr.splitlines(), result.describe()
        assert result.stderr.count("SystemExit") == (error == "SystemExit"), result.describe()
        heard = result.stderr.count("\nmpishare.errors.PeerError: ")
        assert heard == (wait == "one of two waits in mpishare"), result.describe()


FILES = """
import sys, time
import mpishare
from mpi4py import MPI
from tests.helpers.reporting import report
world = MPI.COMM_WORLD
with open("/proc/self/maps") as maps:
    report({"files": [line.split()[-1] for line in maps if "/mpich_shm" in line]})
def node():
    return mpishare.Node(backend="host", timeout_s=3)
"""
ENDINGS = {
    "an exception": "node()\nif world.rank:\n    raise ValueError\nworld.Barrier()",
    "an exit": "node()\nif world.rank:\n    sys.exit(3)\nworld.Barrier()",
    "a late rank": "node = node()\nif world.rank:\n    time.sleep(1000)\nnode.barrier()",
    "a rank without a node": "if world.rank:\n    time.sleep(1000)\nnode()",
}


@pytest.mark.skipif(launcher()[1] != "mpich", reason="the launcher of Open MPI removes its files")
@pytest.mark.parametrize("ending", ENDINGS)
def test_an_aborted_job_leaves_no_file_of_mpich(monkeypatch, tmp_path, ending):
    """They are of 1 MiB for each rank: after a dozen runs a container's /dev/shm is full."""
    monkeypatch.setattr(launch, "remove_unused", set)  # which the tests do after each job
    program = tmp_path / "program.py"
    program.write_text(FILES + ENDINGS[ending] + "\n")
    result = run_ranks(2, [sys.executable, "-m", "mpi4py", program])
    assert result.returncode != 0, result.describe()
    files = {file for told in result.reports.values() for file in told["files"]}
    assert files, result.describe()
    left = [Path(file) for file in files if Path(file).exists()]
    for file in left:
        file.unlink()
    assert not left, result.describe()

"""Which GPUs a rank sees: each row of the table of docs/slurm.md, as it says."""

import re
from pathlib import Path

import pytest

from tests.helpers.launch import ROOT
from tests.slurm.cluster import Cluster, programs_lines
from tests.slurm.conftest import Mpi

pytestmark = pytest.mark.timeout(120)
# | `options` | visible | visible, confined | may open, confined | verdict |
ROW = re.compile(r"^\| `(--gpu.+?)` \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
ROWS = {found[1]: found[2] for found in ROW.finditer(Path(ROOT, "docs/slurm.md").read_text())}
LOOK = """
import os
print(os.environ["SLURM_PROCID"], os.environ.get("CUDA_VISIBLE_DEVICES", "unset"), flush=True)
"""

# What a rank on the only GPU that it may open would say of this environment.
SAY = """
import os
from mpishare.runtime.preflight import one_gpu_note
print(os.environ["SLURM_LOCALID"], one_gpu_note(["GPU-pretended"] * 4, os.environ), flush=True)
"""


@pytest.fixture(scope="session")
def look(folder: Path) -> Path:
    """A program that says what it sees."""
    file = folder / "look.py"
    file.write_text(LOOK)
    return file


def expected(cell: str) -> list[str]:
    text = cell.replace("`", "")
    return [text.removesuffix(" on all")] * 4 if text.endswith(" on all") else text.split(" / ")


@pytest.mark.parametrize("options", ROWS)
def test_a_row(free: Cluster, mpich: Mpi, look: Path, options: str):
    done = free.srun("-N1", "-n4", *options.split(), mpich.python, "-IS", look)
    if "allow-task-sharing" in options and free.version < (23, 11, 4):
        assert "Invalid --gres-flags" in done.error, done.describe()
        return
    seen = sorted(line.split() for line in programs_lines(done.output))
    assert [each for _, each in seen] == expected(ROWS[options]), done.describe()


def test_the_page_has_the_rows_that_matter():
    assert {"--gpus-per-node=4", "--gpus-per-task=1", "--gpus-per-task=1 --gpu-bind=none"} <= {
        *ROWS
    }
    lines = Path(ROOT, "docs/slurm.md").read_text().partition("| devices confined |")[2]
    assert len(ROWS) == lines.partition("\n\n")[0].count("\n| `--") >= 7


@pytest.mark.parametrize("way", ["mpirun", "srun --gpu-bind=map_gpu:0"], ids=["mpirun", "srun"])
def test_ranks_that_all_sit_on_one_gpu_are_warned(
    free: Cluster, mpich: Mpi, folder: Path, way: str
):
    """By what SLURM says to them; it names their number on the node wrongly under mpirun."""
    program = folder / "say.py"
    program.write_text(SAY)
    option = "--gpus-per-task=1" if way == "mpirun" else "--gpus-per-node=4"
    text = f"PATH={mpich.environment}/bin:$PATH\n{way} {mpich.python} {program}"
    done = free.wait(free.write(text, "-N1", "-n4", option))
    assert done.status == 0, done.describe()
    said = [line.split(maxsplit=1) for line in sorted(programs_lines(done.output))]
    of_node = ["0"] * 4 if way == "mpirun" else ["0", "1", "2", "3"]
    assert [number for number, _ in said] == of_node, done.describe()
    assert all("though this job has 4 GPUs here" in note for _, note in said), done.describe()

"""Which GPUs a rank sees and may open: each row of the table of docs/slurm.md, as it says."""

import re
from pathlib import Path

import pytest

from tests.helpers.launch import ROOT
from tests.slurm.cluster import GPUS, Cluster, programs_lines
from tests.slurm.conftest import Mpi

pytestmark = pytest.mark.timeout(120)
# | `options` | visible | visible, confined | may open, confined | verdict |
ROW = re.compile(r"^\| `(--gpu.+?)` \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
ROWS = {
    found[1]: found.groups()[1:4] for found in ROW.finditer(Path(ROOT, "docs/slurm.md").read_text())
}
LOOK = """
import os, sys
def may_open(number):
    try:
        os.close(os.open(f"{sys.argv[1]}/dev/nvidia{number}", os.O_RDWR))
    except PermissionError:
        return False
    except OSError:
        pass  # no driver is behind it
    return True
rank = os.environ.get("PMI_RANK") or os.environ["SLURM_PROCID"]
opened = ",".join(str(number) for number in range(4) if may_open(number))
print(rank, os.environ.get("CUDA_VISIBLE_DEVICES", "unset"), opened or "none", flush=True)
"""


# What a rank on the only GPU that it may open would say of this environment.
SAY = """
import os
from mpishare.runtime.launch import one_gpu_note
print(os.environ["SLURM_LOCALID"], one_gpu_note(["GPU-pretended"] * 4, os.environ), flush=True)
"""


@pytest.fixture(scope="session")
def look(folder: Path) -> Path:
    """A program that says what it sees and may open."""
    file = folder / "look.py"
    file.write_text(LOOK)
    return file


def by_rank(output: str) -> list[tuple[str, str]]:
    rows = sorted(line.split() for line in output.splitlines() if re.match(r"\d \S+ \S+$", line))
    return [(visible, opened) for _, visible, opened in rows]


def expected(cell: str) -> list[str]:
    text = cell.replace("`", "")
    return [text.removesuffix(" on all")] * 4 if text.endswith(" on all") else text.split(" / ")


@pytest.mark.parametrize("is_confined", [False, True], ids=["free", "confined"])
@pytest.mark.parametrize("options", ROWS)
def test_a_row(
    request: pytest.FixtureRequest, mpich: Mpi, look: Path, options: str, is_confined: bool
):
    cluster: Cluster = request.getfixturevalue("confined" if is_confined else "free")
    visible, visible_confined, opened = map(expected, ROWS[options])
    words = ("-N1", "-n4", *options.split())
    done = cluster.srun(*words, mpich.python, "-IS", look, cluster.folder)
    if "allow-task-sharing" in options and cluster.version < (23, 11, 4):
        assert "Invalid --gres-flags" in done.error, done.describe()
        return
    seen = by_rank(done.output)
    assert [each for each, _ in seen] == (visible_confined if is_confined else visible)
    every = ",".join(map(str, range(GPUS)))
    assert [each for _, each in seen] == (opened if is_confined else [every] * 4), done.describe()


def test_the_page_has_the_rows_that_matter():
    assert {"--gpus-per-node=4", "--gpus-per-task=1", "--gpus-per-task=1 --gpu-bind=none"} <= {
        *ROWS
    }
    lines = Path(ROOT, "docs/slurm.md").read_text().partition("| devices confined |")[2]
    assert len(ROWS) == lines.partition("\n\n")[0].count("\n| `--") >= 7


@pytest.mark.parametrize(
    ("option", "opened"), [("--gpus-per-task=1", "0"), ("--gpus-per-node=4", "0,1,2,3")]
)
def test_to_slurm_mpirun_is_one_task(
    confined: Cluster, mpich: Mpi, look: Path, option: str, opened: str
):
    """So `--gpus-per-task=1` in a job script gives all its ranks one GPU, and the names of four."""
    text = f"{mpich.environment}/bin/mpirun {mpich.python} -IS {look} {confined.folder}"
    done = confined.wait(confined.write(text, "-N1", "-n4", option))
    assert by_rank(done.output) == [("0,1,2,3", opened)] * 4, done.describe()


@pytest.mark.parametrize("way", ["mpirun", "srun --gpu-bind=map_gpu:0"], ids=["mpirun", "srun"])
def test_ranks_that_all_sit_on_one_gpu_are_warned(
    confined: Cluster, mpich: Mpi, folder: Path, way: str
):
    """By what SLURM says to them; it names their number on the node wrongly under mpirun."""
    program = folder / "say.py"
    program.write_text(SAY)
    option = "--gpus-per-task=1" if way == "mpirun" else "--gpus-per-node=4"
    text = f"PATH={mpich.environment}/bin:$PATH\n{way} {mpich.python} {program}"
    done = confined.wait(confined.write(text, "-N1", "-n4", option))
    assert done.status == 0, done.describe()
    said = [line.split(maxsplit=1) for line in sorted(programs_lines(done.output))]
    of_node = ["0"] * 4 if way == "mpirun" else ["0", "1", "2", "3"]
    assert [number for number, _ in said] == of_node, done.describe()
    assert all("though this job has 4 GPUs here" in note for _, note in said), done.describe()

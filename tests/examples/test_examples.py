"""Each example runs as its docstring says, on the host and on GPUs, and ends with its verdict."""

import ast
import importlib.util
import re
import sys

import pytest

from tests.helpers.c_program import compiler
from tests.helpers.compiled import WHY_NONE
from tests.helpers.launch import ROOT, launcher, run_ranks
from tests.helpers.nvcc import find_cuda_include
from tests.helpers.scenes import BACKENDS
from tests.helpers.shared_job import play_shared

EXAMPLES = ROOT / "scripts" / "examples"
FILES = sorted(EXAMPLES.glob("[0-9]*.py"))
NAMES = [file.stem for file in FILES]
# Some make a thousand plans, or import a large library on four ranks: long on a busy machine.
TIMEOUT_S = 120
# Of windows inside kernels; and on ranks that share a GPU without MPS of all kernels that wait.
REFUSALS = {
    "host": {"window.device": "the host backend has no kernels"},
    "cuda": {
        "window.device": "without the Multi-Process Service",
        "RowExchange": "Start MPS where ranks share a GPU",
    },
}
# These start processes, which import them by name, or are refused on the host: each is a job.
APART = re.compile(r"multiprocessing|subprocess|window\.device")

pytestmark = pytest.mark.timeout(150)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_right(name: str, backend: str) -> None:
    file = EXAMPLES / f"{name}.py"
    program = file.read_text()
    for library in ("torch", "triton", "jax", "warp"):
        if f"import {library}\n" in program and importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    if "int main" in program:
        compiler("c99")  # skips where there is none
    if "MPISHARE_CHECK" in program and WHY_NONE:
        pytest.skip(f"no compiled part, which finds races: {WHY_NONE}")
    (ranks, words) = re.findall(r"^    mpirun -n (\d) python (.*)$", program, re.MULTILINE)[0]
    assert words == f"-m mpi4py scripts/examples/{name}.py"
    if 'Node(backend="host")' in program:
        backend = "host"  # on machines with GPUs, too
    env = {"MPISHARE_BACKEND": backend}
    if backend == "host" and not APART.search(program):
        result = play_shared(int(ranks), program, env=env, timeout_s=TIMEOUT_S)
    else:
        command = [sys.executable, "-m", "mpi4py", file]
        env["CPATH"] = find_cuda_include() or ""
        result = run_ranks(int(ranks), command, timeout_s=TIMEOUT_S, env=env)
    refusals = [text for word, text in REFUSALS[backend].items() if word in program]
    if refusals and (backend == "host" or result.returncode):
        assert result.returncode != 0, result.describe()
        assert refusals[0] in result.stderr, result.describe()
        return
    assert result.returncode == 0, result.describe()
    assert result.stdout.endswith("right\n"), result.describe()
    # Where ranks share a GPU without MPS, a loop on the GPU is made by the host, with a warning.
    said = [line for line in result.stderr.splitlines() if "is looked at by the host" not in line]
    assert said == [], result.describe()


def test_on_pretended_nodes() -> None:
    """The example of several nodes on two: shared memory inside of each, messages between."""
    if launcher()[1] != "mpich":
        pytest.skip("only the launcher of MPICH pretends to be on several nodes")
    command = [sys.executable, "-m", "mpi4py", EXAMPLES / "22_several_nodes.py"]
    options = ("-launcher", "fork", "-hosts", "nodea:2,nodeb:2")
    env = {"MPISHARE_BACKEND": "host"}
    result = run_ranks(4, command, timeout_s=TIMEOUT_S, env=env, extra_mpirun=options)
    lines = result.stdout.splitlines()
    assert lines[0] == "rank 0: rank 1 by host, rank 3 by mpi", result.describe()
    assert lines[3] == "rank 3: rank 0 by mpi, rank 2 by host", result.describe()
    assert lines[-1].endswith("right"), result.describe()
    assert result.returncode == 0, result.describe()


@pytest.mark.parametrize("name", NAMES)
def test_it_is_short_and_stands_alone(name: str) -> None:
    program = (EXAMPLES / f"{name}.py").read_text()
    assert 20 <= len(program.splitlines()) <= 60
    imported = set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
    outside = imported - sys.stdlib_module_names
    known = {"mpishare", "mpi4py", "numpy", "torch", "triton", "jax", "warp", "cupy"}
    assert outside <= known
    assert "mpishare" in outside


def test_the_readme_has_a_line_for_each() -> None:
    rows = re.findall(r"^\| \[(\w+)\]\((\w+)\.py\) \|", (EXAMPLES / "README.md").read_text(),
                      re.MULTILINE)  # fmt: skip
    assert rows == [(name, name) for name in NAMES]
    assert [name[:2] for name in NAMES] == sorted({name[:2] for name in NAMES})


@pytest.mark.parametrize("name", ["02_halo_1d", "05_mesh", "22_several_nodes"])
def test_a_wrong_exchange_is_seen(name: str, tmp_path) -> None:
    """The verdict depends on the exchange: without it the program fails."""
    program = (EXAMPLES / f"{name}.py").read_text()
    broken, count = re.subn(r"^( +)(halo|exchange)\.(exchange|start|wait)\(.*\)$", r"\1pass",
                            program, flags=re.MULTILINE)  # fmt: skip
    assert count
    (tmp_path / "broken.py").write_text(broken)
    command = [sys.executable, "-m", "mpi4py", tmp_path / "broken.py"]
    result = run_ranks(2, command, timeout_s=TIMEOUT_S, env={"MPISHARE_BACKEND": "host"})
    assert result.returncode != 0, result.describe()
    assert "WRONG" in result.stderr, result.describe()

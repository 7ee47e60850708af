"""Programs of the pages and the examples pass two type checkers, as their readers' would."""

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import mpishare
from mpishare.memory import types
from mpishare.reduction.operation import OPERATIONS
from mpishare.runtime.route import ROUTES
from tests.docs.pages import ROOT, programs

pytestmark = pytest.mark.timeout(240)  # two checkers read NumPy

EXAMPLES = [
    *(ROOT / "scripts/examples").glob("*.py"),
    *(ROOT / "scripts/applications").glob("*.py"),
]

WRONG = """\
import mpishare
from mpi4py import MPI
import numpy as np

u, comm = np.zeros(4), MPI.COMM_WORLD
halo = mpishare.HaloExchange(comm, u, 1, dims=(1,))
mpishare.Layout(5, order="R")  # wrong
mpishare.Node(backend="gpu")  # wrong
mpishare.Allreduce(comm, u, op="add")  # wrong
mpishare.Allreduce(comm, 4)  # wrong
mpishare.HaloExchange(comm, u, "wide", dims=(1,))  # wrong
mpishare.HaloExchange(comm, u, 1, require="fast")  # wrong
halo.exchange([u, u])  # wrong
halo.exchange(u, stream="new")  # wrong
mpishare.capture(mpishare.Node(), print, until=bool)  # wrong
node, total = mpishare.Node(), mpishare.Allreduce(comm, u)
plan = mpishare.Redistribute(comm, 4, 0, None)


def advance(v: np.ndarray, dt: float) -> float:
    return dt


step = mpishare.capture(node, advance)
step(u)  # wrong
step(u, 0.5).nothing  # wrong
total.reduce(u).nothing  # wrong
total.dot(u, u, u).nothing  # wrong
plan.forward(u).nothing  # wrong
plan.backward(node.allocate(4), u).nothing  # wrong
table = node.share(u, readonly=True)
table.segment(0).nbytes.nothing  # wrong
table.array += 1.0
host: np.ndarray = table.array[1:].get()  # of CuPy
"""

# The types of these take mypy a minute to read, and are not ours.
MYPY = """\
[mypy]
check_untyped_defs = True
ignore_missing_imports = True
scripts_are_modules = True
python_version = 3.11
[mypy-torch.*,jax.*,sphinx.*]
follow_imports = skip
"""

PYRIGHT = {
    "include": ["."],
    "extraPaths": [str(ROOT), str(ROOT / "scripts/applications")],
    "pythonVersion": "3.11",
    "typeCheckingMode": "standard",
    "reportMissingImports": "none",  # of packages for GPUs, and of what an example builds
    "reportMissingModuleSource": "none",
    "reportIndexIssue": "none",  # Triton's decorator is one of these
}


def mypy(folder: Path) -> list[str]:
    """Return what mypy says of programs, by its defaults and inside of functions without types."""
    config = folder / "mypy.ini"
    config.write_text(MYPY)
    return errors("mypy", f"--config-file={config}", *sorted(folder.glob("*.py")))


def pyright(folder: Path) -> list[str]:
    (folder / "pyrightconfig.json").write_text(json.dumps(PYRIGHT))
    return errors("pyright", "--pythonpath", sys.executable, "-p", folder)


def errors(*command: str | Path) -> list[str]:
    """Run a checker; return its errors, each with the name of the file in front."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"^\s*\S*/(\S+:\d+:.* error: .*)", done.stdout, re.MULTILINE)
    assert len(found) == len(re.findall(r" error: ", done.stdout))
    return found


def public() -> Iterator[str]:
    """A program that reads each public name, for a checker that refuses what has no type."""
    yield "# pyright: strict\nimport mpishare\n"
    for name in mpishare.__all__:
        found = getattr(mpishare, name)
        attributes = {
            each
            for kind in (inspect.getmro(found) if inspect.isclass(found) else ())
            if kind.__module__.startswith("mpishare")
            for each in (*vars(kind), *stated(kind))
            if not each.startswith("_")
        }
        read = "".join(f", it.{each}" for each in sorted(attributes))
        given = f"it: mpishare.{name}" if attributes else ""
        yield f"def {name.strip('_')}({given}) -> object:\n    return mpishare.{name}{read}\n"


def stated(kind: type) -> list[str]:
    """The attributes of instances, which the docstring has."""
    _, _, text = inspect.cleandoc(kind.__doc__ or "").partition("Attributes\n----------\n")
    lines = re.findall(r"^(\w[\w, ]*) : ", text.partition("\n\n")[0], re.MULTILINE)
    return [each for line in lines for each in line.split(", ")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("programs")
    for block, _ in programs():
        name = re.sub(r"\W", "_", block.name)
        (made / f"program_{name}.py").write_text(block.text)
    for path in EXAMPLES:
        (made / path.name).write_text(path.read_text())
    (made / "wrong.py").write_text(WRONG)
    (made / "public.py").write_text("\n\n".join(public()))
    return made


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_programs_and_public_names_have_types_and_wrong_calls_are_found(folder, checker) -> None:
    pytest.importorskip(checker.__name__)
    assert len([*folder.glob("program_*.py")]) > 20
    found = checker(folder)
    assert [line for line in found if not line.startswith("wrong.py")] == []
    wrong = [at for at, line in enumerate(WRONG.splitlines(), 1) if line.endswith("# wrong")]
    assert sorted({int(line.split(":")[1]) for line in found}) == wrong


def test_names_of_types_are_those_of_the_tables() -> None:
    assert set(get_args(types.RouteName)) == set(ROUTES)
    assert set(get_args(types.OperationName)) == set(OPERATIONS)

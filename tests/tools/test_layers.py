"""The layers: who may import whom, what stays out of the package, what importing it costs."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from scripts.lib.structure import PACKAGE, imports, module_of, modules_of, room
from tests.helpers.launch import ROOT

MAX_ROOT_MODULES = 5
# From the bottom up. A room is a folder, or a module of the root, and imports only from rows below;
# rooms of one row do not know each other. Within a room no two modules import each other in a
# circle.
LAYERS = (
    "errors device",
    "memory native",
    "coordination",
    "backends",
    "runtime",
    "windows",
    "view",
    "node",
    "plans",
    "halo reduction graphs",
    "redistribution",
    "__init__ jax",
    "tools",
    "info mps bench",
)
DRIVER_FILES = ("driver", "cuda_pools", "cuda_chunks", "cuda_graphs", "nvml")
DRIVERS = tuple(f"mpishare.backends.{name}" for name in DRIVER_FILES)
LAYER_OF = {room: number for number, row in enumerate(LAYERS) for room in row.split()}


def may_import(module: str, other: str) -> bool:
    mine, theirs = room(module), room(other)
    if mine != theirs:
        return LAYER_OF[theirs] < LAYER_OF[mine]
    # The two engines do not know each other.
    mine, theirs = engine(module), engine(other)
    return mine is None or theirs is None or mine == theirs


def engine(module: str) -> str | None:
    """The kind of memory of the engine that a module is part of."""
    inner = module.removeprefix("mpishare.plans.exchange.")
    return inner.partition(".")[0] if inner.startswith(("host", "cuda")) else None


def flaws(root: Path) -> list[str]:
    """Everything that is wrong with the files of the package below `root`, one line each."""
    files = {name: path for name, path in modules_of(root).items() if name.startswith(PACKAGE)}
    found = []
    edges: dict[str, set[str]] = {}
    in_root = [module for module in files if files[module].parent == root / PACKAGE]
    if len(in_root) > MAX_ROOT_MODULES:
        found.append(f"{len(in_root)} modules in the root, more than {MAX_ROOT_MODULES}")
    for module, path in files.items():
        tree = ast.parse(path.read_text())
        if any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
            found.append(f"{module} has an assert, which -O strips")
        if room(module) not in LAYER_OF:
            found.append(f"{module} is in no layer")
            continue
        names = {*imports(tree, module, path)}
        if module not in DRIVERS and any(name.startswith("cuda.bindings") for name in names):
            found.append(f"{module} imports cuda.bindings")
        others = {module_of(name, files) for name in names} - {None}
        if room(module) != "bench":  # whose types name each other as they like
            edges[module] = others
        for other in sorted(others):
            if room(other) not in LAYER_OF or not may_import(module, other):
                found.append(f"{module} imports {other}, which is not below it")
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        found.append("a circle of imports: " + " -> ".join(error.args[1]))
    return found


def test_the_package_stands():
    assert flaws(ROOT) == []


def test_every_room_is_on_the_map():
    text = (ROOT / "docs" / "architecture.md").read_text()
    tower = text[text.index("```text") : text.index("```\n\n")]
    rooms = [room for row in LAYERS for room in row.split()]
    assert [room for room in rooms if f"{room}/" not in tower and f"{room}.py" not in tower] == []


@pytest.mark.parametrize(
    ("name", "source", "flaw"),
    [
        ("coordination/waits", "from ..errors import MpiShareError", None),
        (
            "coordination/waits",
            "def later():\n    from mpishare import node",
            "imports mpishare.node",
        ),
        ("coordination/waits", "import mpishare.windows.event", "imports mpishare.windows.event"),
        ("coordination/waits", "from .. import node", "imports mpishare.node"),
        ("backends/host", "from mpishare.backends.cuda import x", "a circle of imports"),
        ("windows/pool", "from cuda import bindings", "windows.pool imports cuda.bindings"),
        ("windows/pool", "assert True", "windows.pool has an assert"),
        ("attic/box", "", "attic.box is in no layer"),
        (
            "plans/exchange/host/engine",
            "from mpishare.plans.exchange.cuda import engine",
            "imports mpishare.plans.exchange.cuda.engine",
        ),
    ],
)
def test_each_flaw_is_found(tmp_path, name, source, flaw):
    engines = "plans/exchange/cuda/engine plans/exchange/host/engine"
    others = f"node errors windows/event backends/cuda {engines}"
    package = tmp_path / PACKAGE
    for other in (*others.split(), name):
        path = package / f"{other}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (package / "backends/cuda.py").write_text("from mpishare.backends import host")
    (package / f"{name}.py").write_text(source)
    found = flaws(tmp_path)
    assert len(found) == (flaw is not None), found
    assert flaw is None or flaw in found[0]


def test_the_import_starts_neither_mpi_nor_cupy():
    """Nor does a help: tests/bench/test_cli.py."""
    code = "import mpishare, sys; print({'mpi4py.MPI', 'cupy', 'torch'} & {*sys.modules})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"

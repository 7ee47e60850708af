"""The layers: who may import whom, what stays out of the package, what importing it costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launch import ROOT

PACKAGE = ROOT / "mpishare"
MAX_ROOT_MODULES = 5
# From the bottom up. A room is a folder, or a module of the root, and imports only from rows below;
# rooms of one row do not know each other. Within a room no two modules import each other in a
# circle.
LAYERS = (
    "errors",
    "memory",
    "coordination",
    "backends",
    "runtime",
    "windows",
    "device",
    "node",
    "plans",
    "halo reduction graphs",
    "redistribution",
    "__init__ jax",
    "info mps bench",
)
DRIVER_FILES = ("driver", "cuda_pools", "cuda_chunks", "cuda_graphs", "nvml")
# The last is a program, which imports nothing of the package.
DRIVERS = (*(f"backends.{name}" for name in DRIVER_FILES), "runtime.mpi_trial")
# The floors of the halo: what all engines use, the two engines, and the plans on top.
PLANS = ("engine_pair", "any_fields", "plan", "cartesian", "neighbors")
LAYER_OF = {room: number for number, row in enumerate(LAYERS) for room in row.split()}


def room_of(module: str) -> str:
    """The room of `backends.cuda` is `backends`; the halo is three floors by itself."""
    return module.partition(".")[0]


def halo_floor(module: str) -> int:
    parts = module.split(".")
    if len(parts) == 1 or parts[1] in PLANS:
        return 2
    return 1 if parts[1] in ("host", "cuda") else 0


def module_of(path: Path, package: Path) -> str:
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, module: str, known: set[str]) -> set[str]:
    """Every module imported anywhere in the file, those of mpishare without that prefix."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = ["mpishare", *module.split(".")][: -node.level]
                base = ".".join([*above, *filter(None, [base])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                is_module = full.removeprefix("mpishare.") in known
                found.add(full if is_module or base in ("cuda", "mpi4py") else base)
    return found


def may_import(module: str, other: str) -> bool:
    mine, theirs = room_of(module), room_of(other)
    if mine != theirs:
        return LAYER_OF[theirs] < LAYER_OF[mine]
    if mine != "halo":
        return True
    if halo_floor(module) != halo_floor(other):
        return halo_floor(other) < halo_floor(module)
    return halo_floor(module) != 1 or module.split(".")[1] == other.split(".")[1]


def cycle(edges: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; empty where none do."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module not in done:
            for other in sorted(edges.get(module, ())):
                if found := visit(other, [*path, module]):
                    return found
            done.add(module)
        return []

    return next(filter(None, (visit(module, []) for module in sorted(edges))), [])


def flaws(package: Path) -> list[str]:
    """Everything that is wrong with the files of `package`, one line each."""
    files = {module_of(path, package): path for path in sorted(package.rglob("*.py"))}
    found = []
    edges: dict[str, set[str]] = {}
    in_root = [module for module in files if files[module].parent == package]
    if len(in_root) > MAX_ROOT_MODULES:
        found.append(f"{len(in_root)} modules in the root, more than {MAX_ROOT_MODULES}")
    for module, path in files.items():
        tree = ast.parse(path.read_text())
        if any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
            found.append(f"{module} has an assert, which -O strips")
        if room_of(module) not in LAYER_OF:
            found.append(f"{module} is in no layer")
            continue
        for name in sorted(imports(tree, module, set(files))):
            if name.startswith("cuda.bindings") and module not in DRIVERS:
                found.append(f"{module} imports {name}")
            if name.partition(".")[0] != "mpishare":
                continue
            other = name.partition(".")[2] or "__init__"
            if room_of(module) != "bench":  # whose types name each other as they like
                edges.setdefault(module, set()).add(other)
            if room_of(other) not in LAYER_OF or not may_import(module, other):
                found.append(f"{module} imports {other}, which is not below it")
    if circle := cycle(edges):
        found.append("a circle of imports: " + " -> ".join(circle))
    return found


def test_the_package_stands():
    assert flaws(PACKAGE) == []


def test_every_room_is_on_the_map():
    text = (ROOT / "docs" / "architecture.md").read_text()
    tower = text[text.index("```text") : text.index("```\n\n")]
    rooms = [room for row in LAYERS for room in row.split()]
    assert [room for room in rooms if f"{room}/" not in tower and f"{room}.py" not in tower] == []


@pytest.mark.parametrize(
    ("name", "source", "flaw"),
    [
        ("coordination/waits", "from ..errors import MpiShareError", None),
        ("coordination/waits", "def later():\n    from mpishare import node", "imports node"),
        ("coordination/waits", "import mpishare.windows.event", "imports windows.event"),
        ("coordination/waits", "from .. import node", "imports node"),
        ("backends/host", "from mpishare.backends.cuda import x", "a circle of imports"),
        ("windows/pool", "from cuda import bindings", "windows.pool imports cuda.bindings"),
        ("windows/pool", "assert True", "windows.pool has an assert"),
        ("attic/box", "", "attic.box is in no layer"),
        ("halo/host/engine", "from mpishare.halo.cuda import engine", "imports halo.cuda.engine"),
        ("halo/geometry", "from mpishare.halo.host import engine", "imports halo.host.engine"),
    ],
)
def test_each_flaw_is_found(tmp_path, name, source, flaw):
    others = "node errors windows/event backends/cuda halo/cuda/engine halo/host/engine"
    for other in (*others.split(), name):
        path = tmp_path / f"{other}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (tmp_path / "backends/cuda.py").write_text("from mpishare.backends import host")
    (tmp_path / "backends/host.py").write_text("")
    (tmp_path / f"{name}.py").write_text(source)
    found = flaws(tmp_path)
    assert len(found) == (flaw is not None), found
    assert flaw is None or flaw in found[0]


def test_the_import_starts_neither_mpi_nor_cupy():
    """Nor does a help: tests/bench/test_cli.py."""
    code = "import mpishare, sys; print({'mpi4py.MPI', 'cupy', 'torch'} & {*sys.modules})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"

"""The building: who may import whom, what stays out of the package, what importing it costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launch import ROOT

PACKAGE = ROOT / "mpishare"
MAX_LINES = 320
# A module imports only from lower floors. A package stands for what is in it, unless named.
FLOORS = {
    "errors": 0,
    "geometry": 0,
    "local": 0,
    "lastwords": 0,
    "mapping": 0,
    "ranges": 1,
    "handles": 1,
    "launch": 1,
    "shm": 1,
    "backends": 2,
    "common": 2,
    "control": 2,
    "counters": 1,
    "blame": 3,
    "backends.available": 3,
    "backends.driver": 3,
    "chain": 3,
    "pieces": 3,
    "report": 3,
    "rounds": 3,
    "waits": 4,
    "agree": 5,
    "messages": 5,
    "backends.cuda": 5,
    "backends.host": 5,
    "choose": 6,
    "watch": 6,
    "ending": 8,
    "ground": 7,
    "event": 8,
    "order": 8,
    "probe": 8,
    "epochs": 9,
    "form": 9,
    "window": 10,
    "allocate": 11,
    "node": 12,
    "halo.layout": 13,
    "halo.absent": 13,
    "halo.apart": 15,
    "halo.nodes": 14,
    "halo.ranks": 14,
    "halo.cudafields": 14,
    "halo.kernels": 14,
    "halo.message": 14,
    "halo.mover": 14,
    "halo.moves": 14,
    "halo.own": 14,
    "halo.turns": 14,
    "halo.lent": 15,
    "halo.slabs": 15,
    "halo.shelves": 16,
    "halo.words": 15,
    "halo.mail": 15,
    "halo.routes": 15,
    "halo.tables": 15,
    "halo.host": 17,
    "halo.mpi": 16,
    "halo.staging": 16,
    "halo.known": 16,
    "halo.terms": 16,
    "halo.hostmover": 18,
    "halo.setting": 17,
    "halo.fused": 18,
    "halo.relay": 18,
    "halo.cuda": 19,
    "halo.plan": 21,
    "halo.cartesian": 22,
    "halo.neighbors": 22,
    "halo": 23,
    "__init__": 24,
    "bench": 25,
    "info": 26,
}
BENCH = 25  # inside it, modules import each other as they like


def floor(module: str) -> int | None:
    """The floor of `backends.cuda`, from its own line or that of its package."""
    parts = module.split(".")
    names = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    if parts[0] == "backends" and len(parts) > 1:
        names = names[:1]  # each backend stands on a floor of its own
    return next((FLOORS[name] for name in names if name in FLOORS), None)


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


def flaws(package: Path) -> list[str]:
    """Everything that is wrong with the files of `package`, one line each."""
    files = {module_of(path, package): path for path in sorted(package.rglob("*.py"))}
    found = []
    for module, path in files.items():
        text = path.read_text()
        tree = ast.parse(text)
        if text.count("\n") > MAX_LINES:
            found.append(f"{module} has more than {MAX_LINES} lines")
        if any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
            found.append(f"{module} has an assert, which -O strips")
        mine = floor(module)
        if mine is None:
            found.append(f"{module} has no floor")
            continue
        for name in sorted(imports(tree, module, set(files))):
            if name.startswith("cuda.bindings") and module != "backends.driver":
                found.append(f"{module} imports {name}")
            if name.partition(".")[0] != "mpishare":
                continue
            other = name.partition(".")[2] or "__init__"
            theirs = floor(other)
            if theirs is None or (theirs >= mine and not mine == theirs == BENCH):
                found.append(f"{module} (floor {mine}) imports {other} (floor {theirs})")
    return found


def test_the_package_stands():
    assert flaws(PACKAGE) == []


@pytest.mark.parametrize(
    ("name", "source", "flaw"),
    [
        ("control", "from mpishare.errors import MpiShareError", None),
        ("control", "from .errors import MpiShareError", None),
        ("control", "from mpishare.node import Node", "imports node"),
        ("control", "def later():\n    from mpishare import node", "imports node"),
        ("control", "import mpishare.window", "imports window"),
        ("control", "from . import node", "imports node"),
        ("backends/host", "from mpishare.backends.cuda import x", "imports backends.cuda"),
        ("backends/host", "from . import cuda", "imports backends.cuda"),
        ("backends/driver", "from cuda.bindings import driver", None),
        ("window", "from cuda.bindings import driver", "window imports cuda.bindings"),
        ("window", "from cuda import bindings", "window imports cuda.bindings"),
        ("window", "assert True", "window has an assert"),
        ("window", "\n" * MAX_LINES, None),
        ("window", "\n" * MAX_LINES + "x = 1\n", "more than"),
        ("cellar", "", "cellar has no floor"),
        ("backends/attic", "", "backends.attic has no floor"),
        ("bench/cases/ring", "from mpishare.bench import arm\nimport mpishare", None),
    ],
)
def test_each_flaw_is_found(tmp_path, name, source, flaw):
    for other in ("node", "errors", "window", "backends/cuda", "bench/arm", name):
        path = tmp_path / f"{other}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (tmp_path / f"{name}.py").write_text(source)
    found = flaws(tmp_path)
    assert len(found) == (flaw is not None), found
    assert flaw is None or flaw in found[0]


def loaded(code: str) -> set[str]:
    """Which of the heavy modules are loaded once `code` has run in a new process."""
    end = "\nimport sys\nprint(*sorted({'mpi4py.MPI', 'cupy', 'torch'} & set(sys.modules)))"
    command = [sys.executable, "-c", code + end]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def run_help(module: str) -> str:
    return (
        "import runpy, sys\n"
        f"sys.argv = [{module!r}, '--help']\n"
        "try:\n"
        f"    runpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end:\n"
        "    if end.code: raise\n"
    )


@pytest.mark.parametrize(
    "code",
    ["import mpishare", run_help("mpishare.bench"), run_help("mpishare.info")],
    ids=["import", "bench", "info"],
)
def test_import_and_help_start_neither_mpi_nor_cupy(code):
    assert loaded(code) == set()


def test_a_loaded_mpi_would_be_seen():
    code = "import sys, types\nsys.modules['mpi4py.MPI'] = types.ModuleType('mpi4py.MPI')"
    assert loaded(code) == {"mpi4py.MPI"}

"""What scripts/structure counts, on a tree whose numbers are known."""

import importlib.util
import subprocess
import sys

import pytest

from tests.helpers.launch import ROOT

spec = importlib.util.spec_from_file_location("structure", ROOT / "scripts/lib/structure.py")
structure = importlib.util.module_from_spec(spec)
sys.modules["structure"] = structure  # its dataclass asks for its module
spec.loader.exec_module(structure)

FILES = {
    "mpishare/__init__.py": "from mpishare.node import Node\n",
    "mpishare/errors.py": "",
    "mpishare/node.py": """
from typing import TYPE_CHECKING

from mpishare import waits
from mpishare.halo.plan import Plan

if TYPE_CHECKING:
    from mpishare.errors import Error

def simple(): pass

def branched(a, b):
    while a and b:
        for c in [d for d in a if d]: pass
    try: pass
    except ValueError: pass
""",
    "mpishare/waits.py": """
import os, time
from .errors import Error

def wait(event, worker):
    while not event.is_set():
        os.sched_yield()
    while worker.is_alive():
        worker.join(timeout=1)
    for _ in range(3):
        while not event.wait(0.1): pass
    for x in worker: print(x)
    begin = time.monotonic()
""",
    "mpishare/halo/__init__.py": "",
    "mpishare/halo/plan.py": "def later():\n    from ..waits import wait\n",
    "mpishare/halo/fused.cu": "// a kernel\n" * 3,
    "mpishare/bench/__init__.py": "import mpishare\n",
    "mpishare/bench/measure.py": "while time.sleep(1): pass\n",
    "scripts/applications/jacobi.py": "from mpishare import Node\n",
    "tests/test_it.py": "x = 1\n" * 401,
}


@pytest.fixture
def tree(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_a_known_tree(tree):
    found = structure.measure(tree)
    assert found.lists["rooms"] == [
        *("__init__", "applications", "bench", "errors", "halo", "node", "waits"),
    ]
    assert found.lists["arrows"] == [
        "__init__ -> node",
        "applications -> __init__",
        "bench -> __init__",
        "halo -> waits",
        "node -> errors",
        "node -> halo",
        "node -> waits",
        "waits -> errors",
    ]
    assert found.lists["polling loops"] == [f"mpishare/waits.py:{line}" for line in (6, 8, 11)]
    assert found.lists["worst functions"][:2] == [
        "  7 mpishare/node.py:12 branched",
        "  6 mpishare/waits.py:5 wait",
    ]
    assert found.lists["files > 400 lines"] == ["tests/test_it.py 401"]
    assert found.lists["one importer"] == [
        "mpishare.halo.plan <- mpishare.node",
        "mpishare.node <- mpishare",
    ]
    assert found.rows == {
        "modules at the root": 4,
        "rooms": 7,
        "floors": 6,  # errors, waits, halo, node, __init__, bench
        "arrows": 8,
        "  without type checks": 7,
        "circles": 0,
        "lines of the library": sum(
            text.count("\n")
            for name, text in FILES.items()
            if name.startswith("mpishare/") and "/bench/" not in name
        ),
        "lines of the bench": 2,
        "lines of benchmarks": 0,
        "lines of tests": 401,
        "polling loops": 3,
        "one importer": 2,
        "files > 400 lines": 1,
        "complexity > 10": 0,
    }


def test_rooms_that_import_each_other_are_one_floor(tree):
    (tree / "mpishare/errors.py").write_text("from mpishare.node import Node\n")
    found = structure.measure(tree)
    assert found.lists["circles"] == ["errors - halo - node - waits"]
    assert found.rows["floors"] == 3


def test_two_trees_are_set_side_by_side(tree):
    command = [ROOT / "scripts/structure", tree, ROOT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    head, *rows = done.stdout.splitlines()
    assert head.split() == [str(tree), str(ROOT)]
    assert all(len(row.split()) > 2 for row in rows[: rows.index("")])


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ("no-such-revision", "neither a folder nor a revision"),
        ("docs", "docs has no folder mpishare"),
    ],
)
def test_what_is_no_tree_is_refused(tree, words):
    command = [ROOT / "scripts/structure", tree]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert words in done.stderr

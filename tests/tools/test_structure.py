"""What scripts/structure counts, on a tree whose numbers are known."""

import importlib.util
import sys

from tests.helpers.launch import ROOT

spec = importlib.util.spec_from_file_location("structure", ROOT / "scripts/lib/structure.py")
structure = importlib.util.module_from_spec(spec)
sys.modules["structure"] = structure  # its dataclass asks for its module
spec.loader.exec_module(structure)

FILES = {
    "mpishare/__init__.py": "from mpishare.node import Node\n",
    "mpishare/errors.py": "",
    "mpishare/node.py": """
from mpishare import waits
from mpishare.halo.plan import Plan

def branched(a, b):
    while a and b:
        for c in [d for d in a if d]: pass
    try: pass
    except ValueError: pass
""",
    "mpishare/waits.py": """
import os
from .errors import Error

def wait(event, worker):
    while not event.is_set():
        os.sched_yield()
    for x in worker: print(x)
""",
    "mpishare/halo/__init__.py": "",
    "mpishare/halo/plan.py": "def later():\n    from ..waits import wait\n",
    "mpishare/halo/fused.cu": "// a kernel\n" * 3,
    "tests/test_it.py": "x = 1\n" * 401,
}


def test_a_known_tree(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = structure.measure(tmp_path)
    assert found.lists["rooms"] == ["__init__", "errors", "halo", "node", "waits"]
    assert found.lists["arrows"] == [
        *("__init__ -> node", "halo -> waits", "node -> halo", "node -> waits", "waits -> errors"),
    ]
    assert found.lists["polling loops"] == ["mpishare/waits.py:6"]
    assert found.lists["worst functions"][0] == "  7 mpishare/node.py:5 branched"
    rows = [found.rows[name] for name in ("floors", "circles", "lines of tests")]
    assert rows == [5, 0, 401]
    counted = (text.count("\n") for name, text in FILES.items() if name.startswith("mpishare/"))
    assert found.rows["lines of the library"] == sum(counted)
    (tmp_path / "mpishare/errors.py").write_text("from mpishare.node import Node\n")
    found = structure.measure(tmp_path)
    assert found.lists["circles"] == ["errors - halo - node - waits"]

"""What `scripts/structure` counts, in a tree that has a little of everything."""

from scripts.lib.structure import measure

FILES = {
    "mpishare/__init__.py": "",
    "mpishare/fence.c": "int a;\nint b;\n",
    "mpishare/room/keeps.py": """
from functools import cache
from weakref import WeakSet
known = {}
full = {"a": 1}
alive: WeakSet[object] = WeakSet()

@cache
def looked_up():
    local = {}
""",
    "mpishare/bench/copies.cu": "one\n",
    "benchmarks/kernels.cuh": "one\ntwo\n",
    "scripts/run": "#!/bin/sh\n",
    "scripts/lib/more.sh": "true\n",
    "scripts/README.md": "not counted\n",
    "tests/test_it.py": "window._memory\nself._mine\nnode.__dict__\nplan._setup._kernel\n",
}


def test_all_languages_and_what_is_hidden(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = measure(tmp_path)
    lines = {name: found.rows[f"lines of {name}"] for name in ("library", "bench", "benchmarks")}
    assert lines == {"library": 12, "bench": 1, "benchmarks": 2}
    assert found.rows["lines of scripts"] == 2
    private = [where.partition(" ")[2] for where in found.lists["private in tests"]]
    assert sorted(private) == ["plan._setup", "plan._setup._kernel", "window._memory"]
    kept = [where.partition(" ")[2] for where in found.lists["registries"]]
    assert kept == ["known = {}", "alive: WeakSet[object] = WeakSet()", "looked_up()"]

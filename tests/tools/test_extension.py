"""Scripts build the compiled part of a clone: when it is missing or old, and beside each other."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.compiled import needs_compiled
from tests.helpers.launch import ROOT

# Where it could not be built, it cannot be built here.
pytestmark = [needs_compiled, pytest.mark.timeout(120)]

PROGRAM = "import sys; from pathlib import Path; from extension import build, build_and_tell; "
MAKE = PROGRAM + "print(build(Path(sys.argv[1]), Path(sys.executable)))"
SHOW = PROGRAM + "build_and_tell(Path(sys.argv[1]))"


@pytest.fixture
def tree(tmp_path):
    """What there is to build, in a clone of its own."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "mpishare/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    quick = (ROOT / "setup.py").read_text().replace("-O3", "-O0")  # a third of the time
    (tmp_path / "setup.py").write_text(quick)
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "mpishare/native", tmp_path / "mpishare/native", ignore=ignored)
    return tmp_path


def start(tree: Path, program: str = MAKE, **variables: str) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "scripts/lib"), **variables}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", program, tree]
    return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)


def test_two_scripts_at_once_and_one_behind_them(tree):
    beside = [start(tree, CFLAGS="-Werror") for _ in range(2)]
    assert [each.communicate() for each in beside] == [("\n", "")] * 2  # not a word else
    made = tree / "mpishare/native/_host.abi3.so"
    before = made.stat()
    assert start(tree).communicate() == ("\n", "")
    assert made.stat() == before
    assert not [*(tree / "build").iterdir()]
    load = "import sys; sys.path.insert(0, sys.argv[1]); import _host; print(_host.Fence.__name__)"
    assert start(made.parent, load).communicate() == ("Fence\n", "")


def test_what_has_changed_is_built_again_and_a_failure_has_its_reason(tree):
    made = tree / "mpishare/native/_host.abi3.so"
    made.write_text("of older sources")
    os.utime(made, (0, 0))
    (tree / "mpishare/native/copy.c").write_text("#error no luck\n")
    out, err = start(tree, SHOW).communicate()
    assert not out
    assert err.startswith(f"setup: the C part of {tree} is not built: mpishare/native/copy.c:1:")
    assert err.endswith(" no luck\n")
    assert made.read_text() == "of older sources"
    assert not [*(tree / "build").iterdir()]


def test_without_a_compiler(tree):
    out, _ = start(tree, CC="no-such-compiler -m64").communicate()
    assert "no-such-compiler" in out

"""Programs of the pages and the examples pass a type checker, as their readers' programs would."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, programs

pytest.importorskip("mypy")
EXAMPLES = sorted((ROOT / "scripts/examples").glob("*.py"))


# The types of these take mypy a minute to read, and are not ours.
CONFIG = """\
[mypy]
check_untyped_defs = True
ignore_missing_imports = True
scripts_are_modules = True
python_version = 3.11
[mypy-torch.*,jax.*,scipy.*,matplotlib.*,sphinx.*]
follow_imports = skip
"""


def errors(files: list[Path], folder: Path) -> list[str]:
    """Return what mypy says of programs, by its defaults and inside of functions without types."""
    config = folder / "mypy.ini"
    config.write_text(CONFIG)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", f"--config-file={config}", *files],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if ": error: " in line]
    return [line.replace(str(folder), "") for line in found]


def test_every_program_has_the_types_that_it_needs(tmp_path):
    files = []
    for block, _ in programs():
        name = re.sub(r"\W", "_", block.name)
        files.append(tmp_path / f"program_{name}.py")
        files[-1].write_text(block.text)
    assert len(files) > 20
    assert errors([*files, *EXAMPLES], tmp_path) == []


def test_a_program_with_a_wrong_type_is_found(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import mpishare\n\nmpishare.Layout(5, order='R')\n")
    assert len(errors([wrong], tmp_path)) == 1

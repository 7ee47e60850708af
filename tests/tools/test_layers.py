"""Rooms of the package: each is on the map; what importing the package costs."""

import re
import tomllib

from tests.helpers.children import python
from tests.helpers.launch import ROOT


def test_every_room_is_on_the_map():
    """Those of the first contract of import-linter, by which each room is in a layer."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    layers = tools["importlinter"]["contracts"][0]["layers"]
    rooms = [room for row in layers for room in row.split(" | ")]
    text = (ROOT / "docs" / "architecture.md").read_text()
    tower = text[text.index("```text") : text.index("```\n\n")]
    assert [room for room in rooms if f"{room}/" not in tower and f"{room}.py" not in tower] == []


def test_every_answer_on_the_map_is_a_file_and_a_test_that_are_there():
    """Each with the function or the test that stands before it, if any."""
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## Where is ...?")[2]
    rows = [line.split(" | ")[1:] for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 30
    for code, test in rows:
        for cell, root in ((code, ROOT / "mpishare"), (test, ROOT)):
            *names, file = re.findall(r"`([^`]+)`", cell)
            source = (root / file).read_text()
            assert all(name in source for name in names), cell


def test_the_import_starts_neither_mpi_nor_cupy():
    """Nor does a help: tests/bench/test_cli.py."""
    code = "import mpishare, sys; print({'mpi4py.MPI', 'cupy', 'torch'} & {*sys.modules})"
    assert python(code).stdout == "set()\n"

"""docs/errors.md: each of its programs ends in the message that stands below it.

A row is a section `### what you did` with a program, what one rank sees of it, a line `Why:` and a
line `Do:`. The words after `python` say how it runs: `ranks=2`, `rank=1` (which one sees the
message; 0 if it is left out, or `any`), `gpu`, `no-gpu`, `shm=small` or `shm=read-only`, `alone`
(no mpirun), `root` (skipped for other users), `not-built` (a package without its compiled part),
`apart` (it changes or ends its process), and NAME=VALUE for the environment. Rows with none of them
are played by one job. In a message `...` stands for anything. To add a row is to write it.
"""

import importlib.util
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import why_no_gpu
from tests.helpers import launch
from tests.helpers.compiled import WHY_NONE
from tests.helpers.launch import ROOT, run_ranks
from tests.helpers.mounts import SMALL, mount_before_jobs
from tests.helpers.shared_job import play_shared

PAGE = Path(ROOT, "docs/errors.md").read_text()
ROW = re.compile(
    r"### (?P<title>.+)\n\n```python(?P<words>.*)\n(?P<program>(?:.+\n)+)```\n"
    r"```text\n(?P<message>(?:.+\n)+)```\n(?P<why>Why: .+(?:\n.+)*)\n\n(?P<todo>Do: .+(?:\n.+)*)\n"
)
MOST_LINES = 6

HARNESS = """
import gc, linecache, os, pickle, subprocess, sys, tempfile, threading, time
import numpy as np
from mpi4py import MPI
import mpishare
from tests.helpers.reporting import report

if {is_read_only}:
    if MPI.COMM_WORLD.rank == 0:
        subprocess.run("mount -t tmpfs -o ro tmpfs /dev/shm".split(), check=True)
    MPI.COMM_WORLD.Barrier()
linecache.cache["program.py"] = 0, None, {program!r}.splitlines(), "program.py"
try:
    exec(compile({program!r}, "program.py", "exec"))
    report({{"seen": "nothing"}})
except BaseException as error:
    os.seteuid(os.getuid())  # a program may have become somebody else
    report({{"seen": f"{{type(error).__name__}}: {{error}}"}})
    if not {is_shared}:
        raise
if {is_shared}:
    for each in gc.get_objects():
        if type(each) is mpishare.Node and not each.is_closed:
            each.__exit__(RuntimeError, RuntimeError("the end of the row"), None)
"""


@dataclass(frozen=True)
class Row:
    """A section of the page."""

    title: str
    words: str
    program: str
    message: str
    why: str
    todo: str

    @property
    def flags(self) -> set[str]:
        return {word for word in self.words.split() if "=" not in word}

    @property
    def options(self) -> dict[str, str]:
        return dict(word.split("=", 1) for word in self.words.split() if "=" in word)

    @property
    def expected(self) -> str:
        return ".*".join(map(re.escape, " ".join(self.message.split()).split("...")))


ROWS = [Row(**found.groupdict()) for found in ROW.finditer(PAGE)]


def anchor(title: str) -> str:
    """The name that Markdown gives to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_every_section_is_a_row_and_the_table_names_them_all():
    titles = re.findall(r"^### (.+)$", PAGE, re.MULTILINE)
    assert [row.title for row in ROWS] == titles
    assert len(set(titles)) == len(titles)
    links = re.findall(r"^\| \[(.+?)\]\(#(.+?)\) \| `(\w+)` \|$", PAGE, re.MULTILINE)
    assert links == [(row.title, anchor(row.title), row.message.split(":")[0]) for row in ROWS]


def test_every_program_is_short():
    assert all(row.program.count("\n") <= MOST_LINES for row in ROWS)


def start_without_mpirun(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let a stand-in for mpirun leave out what comes before the program."""
    way = Path(folder, "mpirun")
    way.write_text(f'#!/bin/sh\nuntil [ "$1" = {sys.executable} ]; do shift; done\nexec "$@"\n')
    way.chmod(0o755)
    kind = launch.launcher()[1]
    monkeypatch.setattr(launch, "launcher", lambda: (str(way), kind))


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=anchor(row.title), marks=[pytest.mark.gpu] * ("gpu" in row.flags))
        for row in ROWS
    ],
)
def test_the_program_ends_in_the_message(row, monkeypatch, tmp_path):
    environment = row.options
    ranks, rank = int(environment.pop("ranks", 1)), environment.pop("rank", "0")
    shm = environment.pop("shm", "")
    if "no-gpu" in row.flags and not why_no_gpu():
        pytest.skip("there is a GPU")
    if "root" in row.flags and os.geteuid():
        pytest.skip("it needs root")
    if "import torch\n" in row.program and importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    if "MPISHARE_CHECK" in environment and WHY_NONE:
        pytest.skip(f"no compiled part, which finds races: {WHY_NONE}")
    if shm:
        mount_before_jobs(monkeypatch, tmp_path, SMALL)
    has_backend = {"gpu", "no-gpu"} & row.flags or "MPISHARE_BACKEND" in environment
    env = ({} if has_backend else {"MPISHARE_BACKEND": "host"}) | environment
    is_shared = not (row.flags or environment or shm)
    if "alone" in row.flags:
        start_without_mpirun(monkeypatch, tmp_path)
    if "not-built" in row.flags:
        left_out = shutil.ignore_patterns("*.so", "*.[ch]", "__pycache__")
        shutil.copytree(ROOT / "mpishare", tmp_path / "mpishare", ignore=left_out)
        env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    program = HARNESS.format(
        program=row.program, is_read_only=shm == "read-only", is_shared=is_shared
    )
    run = play_shared if is_shared else run_ranks
    result = run(ranks, program, env=env)
    assert not result.timed_out, result.describe()
    seen = {str(rank): " ".join(facts["seen"].split()) for rank, facts in result.reports.items()}
    asked = [*seen] if rank == "any" else [rank]
    assert {*asked} <= seen.keys(), result.describe()
    found = [seen[rank] for rank in asked]
    assert any(re.fullmatch(row.expected, text) for text in found), f"{found}\n{result.describe()}"

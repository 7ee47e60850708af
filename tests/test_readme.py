"""The README is run: its example prints what it says, its commands exist."""

import re
import sys
from pathlib import Path
from textwrap import dedent, indent

import pytest

from tests.helpers.launch import run_ranks

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.mark.limit(120)
def test_the_example_prints_what_the_readme_says():
    for program, begin in zip(programs(), ("4 ranks", "rank 0:"), strict=True):
        assert len([line for line in program.splitlines() if line.strip()]) <= 15
        done = run_ranks(4, program, timeout_s=60)
        assert done.returncode == 0, done.stderr
        printed = [text for text in blocks("text") if text.startswith(begin)]
        assert [done.stdout] == printed


def programs() -> list[str]:
    return [text for text in blocks("python") if "import" in text]


@pytest.mark.limit(120)
def test_the_three_lines_are_those_of_an_example_and_all_are_right():
    (text,) = [text for text in blocks("python") if "import" not in text]
    program = ROOT / "scripts/applications/jacobi2d.py"
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    made = [line.partition(" = ")[2].partition("  #")[0] for line in lines]
    assert len(made) == 3
    assert all(f"return {line}\n" in program.read_text() for line in made)
    for way in (["--staged", "naive"], ["--staged", "pinned"], []):
        command = [sys.executable, str(program), "--n", "16", "--steps", "20", "--check", *way]
        done = run_ranks(4, command, timeout_s=60)
        assert done.returncode == 0, done.stderr
        assert "checked" in done.stdout


OVERLAP = """
import numpy as np
import mpishare
from mpi4py import MPI

with mpishare.Node(backend="host") as node:
    cart = MPI.COMM_WORLD.Create_cart([2, 2], periods=[True, False])
    u, found, expected = np.random.default_rng(node.rank).random((3, 9, 12))
    halo = mpishare.HaloExchange(cart, u, width=1, node=node)

    def compute(part, into=found):
        rows, columns = part
        for step in (-1, 1):
            into[part] += u[slice(rows.start + step, rows.stop + step), columns]
            into[part] += u[rows, slice(columns.start + step, columns.stop + step)]

    found[...] = expected
{}
    halo.exchange(u)
    compute(halo.owned, expected)
    assert (found == expected).all()
    halo.close()
"""


@pytest.mark.limit(60)
def test_the_step_that_overlaps_computes_each_cell_once():
    (step,) = re.findall(r"^  ```python\n(.*?)^  ```$", README, re.MULTILINE | re.DOTALL)
    assert all(name in step for name in ("start", "interior", "wait", "shell"))
    done = run_ranks(4, OVERLAP.format(indent(dedent(step), "    ")), timeout_s=60)
    assert done.returncode == 0, done.stderr


def test_every_script_it_names_is_there():
    named = set(re.findall(r"scripts/[\w-]+", README))
    programs = {"scripts/bench", "scripts/test", "scripts/test-gpu", "scripts/with-mps"}
    assert named == {*programs, "scripts/applications"}
    for name in named - {"scripts/applications"}:
        assert (ROOT / name).stat().st_mode & 0o111, name


def test_the_first_commands_are_the_two():
    assert [line.split()[1] for line in blocks("console")[0].splitlines()] == [
        "scripts/bench",
        "scripts/test",
    ]


def test_info_is_shown_as_it_prints():
    """The columns of the table in the README are those of a real report."""
    done = run_ranks(4, [sys.executable, "-m", "mpishare.info"], timeout_s=60)
    assert done.returncode == 0, done.stderr
    (shown,) = [text for text in blocks("text") if text.startswith("node ")]
    for line in (shown, done.stdout):
        lines = line.splitlines()
        assert re.match(r"node \S+: 4 ranks, backend (cuda|host)", lines[0])
        assert re.match(r"  rank 0 \(given rank 0\), pid \d+.*, leader$", lines[1])
        assert lines[5].split() == ["from", "\\", "to", "0", "1", "2", "3"]
        assert [row.split()[0] for row in lines[6:10]] == ["0", "1", "2", "3"]
        assert all("self" in row for row in lines[6:10])

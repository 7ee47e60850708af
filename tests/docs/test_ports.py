"""What the pages on ports show is as short as they say, fits its version, and moves cells.

`scripts/ports` runs the tests of the codes themselves, with the plug-ins and without: that takes
a network and some minutes. Here only the lines of the patch run.
"""

import os
import re
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT
from tests.helpers.launch import run_right
from tests.helpers.planted import NOBODY, needs_two_users

PORTS = ["veros", "mpi4py_fft", "heat", "quatrex", "fbpic"]
PATCH = ROOT / "docs/ports/veros.patch"
PAGE = ROOT / "docs/ports/veros.md"
PLUG_IN = ROOT / "docs/ports/mpishare_fft.py"
HEAT = ROOT / "docs/ports/mpishare_heat.py"
QUATREX = ROOT / "docs/ports/mpishare_quatrex.py"
FBPIC = ROOT / "docs/ports/fbpic.patch"

#: Veros' settings and neighbors on two ranks along x, then the lines that the patch adds.
PROGRAM = """
import numpy as np
from mpi4py import MPI

class rs:
    backend, num_proc, mpi_comm = "numpy", (2, 1), MPI.COMM_WORLD

SCATTERED_DIMENSIONS = (("xt", "xu"), ("yt", "yu"))
rank = MPI.COMM_WORLD.rank

def get_process_neighbors(cyclic):
    west, east = (1 - rank if cyclic or side != rank else None for side in (0, 1))
    return {"west": west, "east": east, "south": None, "north": None}

TABLE

def exchange_overlap(arr, d1, d2, cyclic):
BLOCK

whole = np.arange(12 * 7 * 3.0).reshape(12, 7, 3)  # twelve cells along x, no ghosts there
for cyclic in True, False:
    for dtype in "f8", "i4":
        index = (np.arange(6 * rank - 2, 6 * rank + 8)) % 12
        arr = whole[index].astype(dtype)
        expected = arr.copy()
        arr[:2] = arr[-2:] = -1
        if not cyclic:  # beyond the wall nothing is exchanged
            wall = np.s_[:2] if rank == 0 else np.s_[-2:]
            expected[wall] = -1
        given = arr.copy()
        for _ in range(3):
            found = exchange_overlap(arr, "xt", "yt", cyclic)
            assert (found == expected).all(), (cyclic, dtype)
            assert (arr == given).all()
print("exchanged")
"""


def added(text: str) -> list[list[str]]:
    """The lines that each hunk adds."""
    hunks = re.split(r"^@@ .*\n", text, flags=re.MULTILINE)[1:]
    return [[line[1:] for line in hunk.splitlines() if line[:1] == "+"] for hunk in hunks]


def changed(patch) -> tuple[int, int]:
    """How many lines a patch adds, and takes away."""
    lines = patch.read_text().splitlines()
    plus, minus = (
        sum(line[:1] == sign and line[:4] != 3 * sign + " " for line in lines) for sign in "+-"
    )
    return plus, minus


def test_the_patch_is_as_short_as_the_page_says() -> None:
    plus, minus = changed(PATCH)
    lines = PATCH.read_text().splitlines()
    assert [line for line in lines if line[:4] == "+++ "] == ["+++ b/veros/distributed.py"]
    assert 0 < plus + minus <= 15
    assert f"| lines changed | | {plus} added, {minus} removed |" in PAGE.read_text()


def test_the_patch_of_fbpic_is_as_long_as_the_page_says() -> None:
    plus, minus = changed(FBPIC)
    assert plus + minus <= 270
    page = FBPIC.with_name("fbpic.md").read_text()
    assert f"It adds {plus} lines, " in page
    assert f" and removes {minus}:" in page


@pytest.mark.parametrize(
    ("plug_in", "page", "most"),
    [(PLUG_IN, "mpi4py_fft.md", 60), (HEAT, "heat.md", 230), (QUATREX, "quatrex.md", 150)],
)
def test_the_plug_in_is_as_short_as_the_page_says(plug_in, page: str, most: int) -> None:
    lines = len(plug_in.read_text().splitlines())
    assert lines <= most
    assert f"It is {lines} lines:" in plug_in.with_name(page).read_text()


@pytest.mark.parametrize("name", PORTS)
def test_the_page_and_the_script_are_for_the_same_version(name: str) -> None:
    script = ROOT / "scripts/ports" / name
    (version,) = re.findall(r"^version=v?(.*)$", script.read_text(), re.MULTILINE)
    assert f"version {version}," in (ROOT / f"docs/ports/{name}.md").read_text()


def test_the_lines_of_the_patch_exchange(tmp_path) -> None:
    table, block = added(PATCH.read_text())
    program = tmp_path / "program.py"
    text = PROGRAM.replace("TABLE", "\n".join(table)).replace("BLOCK", "\n".join(block))
    program.write_text(text)
    done = run_right(2, [sys.executable, "-m", "mpi4py", str(program)], timeout_s=40)
    assert done.stdout.count("exchanged") == 2


@needs_two_users
@pytest.mark.parametrize("name", PORTS)
def test_a_folder_of_another_user_is_refused(name, tmp_path):
    """Its programs would be run: the page names a folder in /tmp, which anybody can make first."""
    os.chown(tmp_path, NOBODY, NOBODY)
    done = subprocess.run(
        [ROOT / "scripts/ports" / name, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"{tmp_path} belongs to another user" in done.stderr

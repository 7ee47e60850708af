"""What the pages on ports show is as short as they say, fits its version, and moves cells.

`scripts/ports` runs the tests of the codes themselves, with the plug-ins and without: that takes
a network and some minutes. Here only the lines of the patches run.
"""

import os
import re
import subprocess

import pytest

from tests.docs.pages import ROOT
from tests.helpers.launch import run_right
from tests.helpers.planted import NOBODY, needs_two_users

PORTS = ["veros", "mpi4py_fft", "heat", "quatrex", "fbpic", "dedalus", "distdl"]
PATCH = ROOT / "docs/ports/veros.patch"
DEDALUS = ROOT / "docs/ports/dedalus.patch"
PLUG_IN = ROOT / "docs/ports/mpishare_fft.py"
HEAT = ROOT / "docs/ports/mpishare_heat.py"
QUATREX = ROOT / "docs/ports/mpishare_quatrex.py"
DISTDL = ROOT / "docs/ports/mpishare_distdl.py"
FBPIC = ROOT / "docs/ports/fbpic.patch"
PAPER = ROOT / "paper/paper.md"

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
print("moved")
"""

#: What FBPIC gives the file that its patch adds: two domains of a periodic box, and 8 particles.
BOX = """
import sys
from types import ModuleType, SimpleNamespace as Some

import numpy as np
from mpi4py import MPI

def module(name, **names):
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__dict__.update(names, __path__=[])

for name in "fbpic", "fbpic.boundaries", "fbpic.utils":
    module(name)
module("fbpic.utils.cuda", cuda_installed=False)
module("fbpic.boundaries.particle_buffer_handling", resize_auxiliary_arrays=lambda species: None)
__package__ = "fbpic.boundaries"

FILE

comm = MPI.COMM_WORLD
rank, other = comm.rank, 1 - comm.rank
box = Some(
    mpi_comm=comm, rank=rank, size=2, left_proc=other, right_proc=other, n_guard=2, use_pml=False,
    boundaries={"z": "periodic"}, moving_win=None, _Nz_global_domain=16, dz=1.0,
    get_Nz_and_iz=lambda **_: (12, 0),
)
rho = [(np.arange(60.0).reshape(12, 5) * (each + 1)).astype(complex) for each in (rank, other)]
grid = Some(use_cuda=False, rho=rho[0].copy(), zmin=8.0 * rank - 2, zmax=8.0 * rank + 10, dz=1.0)
exchange = MpishareExchange(box)
exchange.exchange_fields([grid], "rho", "add")
rho[0][:4] += rho[1][-4:]
rho[0][-4:] += rho[1][:4]
assert (grid.rho == rho[0]).all()

z = 8.0 * rank + np.array([4, -1, 9, 5, -0.5, 6, 8.5, 7])
species = Some(use_cuda=False, z=z, ionizer=None, spin_tracker=None, continuous_injection=False)
species.n_float_quantities, species.n_integer_quantities = 8, 1
species.tracker = Some(id=np.arange(8, dtype="u8") + np.uint64(10 * rank))
for name in "x", "y", "ux", "uy", "uz", "inv_gamma", "w":
    setattr(species, name, np.random.default_rng(rank).random(8))
exchange.exchange_particles(species, Some(interp=[grid]), 0.0)
assert species.tracker.id.tolist() == [
    10 * other + 2, 10 * other + 6, *(10 * rank + each for each in (0, 3, 5, 7)), 10 * other + 1,
    10 * other + 4,
]
assert species.z.tolist() == [8.0 * rank + at for at in (1, 0.5, 4, 5, 6, 7, 7, 7.5)]
assert species.Ntot == len(species.w) == 8
print("moved")
"""

#: Beside the class that Dedalus' patch adds: 5 and 6 elements in chunks of 2, one buffer or two.
TRANSPOSES = """
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
MpishareTranspose.join(comm, comm)
plan = MpishareTranspose((3, 5, 6, 2), (3, 2, 2, 2), complex, 1, comm)
whole = np.arange(3 * 5 * 6 * 2.0).reshape(3, 5, 6, 2) + 1j
columns = whole[:, :, 4 * comm.rank : 4 * comm.rank + 4]
rows = whole[:, 4 * comm.rank : 4 * comm.rank + 4]
memory = np.empty(2 * whole.size, complex)
for at in 0, whole.size:
    CL = np.ndarray(columns.shape, complex, memory)
    RL = np.ndarray(rows.shape, complex, memory[at:])
    for _ in range(3):
        CL[...] = columns
        plan.localize_rows(CL, RL)
        assert (RL == rows).all()
        plan.localize_columns(RL, CL)
        assert (CL == columns).all()
print("moved")
"""


def added(text: str) -> list[list[str]]:
    """The lines that each hunk adds."""
    text = re.sub(r"^(---|\+\+\+) .*\n", "", text, flags=re.MULTILINE)  # the names of files
    hunks = re.split(r"^@@ .*\n", text, flags=re.MULTILINE)[1:]
    return [[line[1:] for line in hunk.splitlines() if line[:1] == "+"] for hunk in hunks]


def changed(patch) -> tuple[int, int]:
    """How many lines a patch adds, and takes away."""
    lines = patch.read_text().splitlines()
    plus, minus = (
        sum(line[:1] == sign and line[:4] != 3 * sign + " " for line in lines) for sign in "+-"
    )
    return plus, minus


@pytest.mark.parametrize(
    ("patch", "most", "said"),
    [
        (PATCH, 15, "| lines changed | | {} added, {} removed |"),
        (FBPIC, 280, "It adds {} lines, 228 of them a file of its own, and removes {}:"),
        (DEDALUS, 120, "taken away | | {}, {} |"),
    ],
    ids=lambda each: getattr(each, "stem", ""),
)
def test_the_patch_is_as_short_as_the_page_says(patch, most: int, said: str) -> None:
    plus, minus = changed(patch)
    assert 0 < plus + minus <= most
    assert said.format(plus, minus) in " ".join(patch.with_suffix(".md").read_text().split())


@pytest.mark.parametrize(
    ("plug_in", "page", "most"),
    [
        (PLUG_IN, "mpi4py_fft.md", 70),
        (HEAT, "heat.md", 250),
        (QUATREX, "quatrex.md", 160),
        (DISTDL, "distdl.md", 180),
    ],
)
def test_the_plug_in_is_as_short_as_the_page_says(plug_in, page: str, most: int) -> None:
    lines = len(plug_in.read_text().splitlines())
    assert lines <= most
    assert f"It is {lines} lines:" in plug_in.with_name(page).read_text()
    assert f" ({lines})" in PAPER.read_text()


@pytest.mark.parametrize("name", PORTS)
def test_the_page_and_the_script_are_for_the_same_version(name: str) -> None:
    script = ROOT / "scripts/ports" / name
    (version,) = re.findall(r"^version=v?(.*)$", script.read_text(), re.MULTILINE)
    assert f"version {version}," in (ROOT / f"docs/ports/{name}.md").read_text()


def veros() -> str:
    table, block = map("\n".join, added(PATCH.read_text()))
    return PROGRAM.replace("TABLE", table).replace("BLOCK", block)


def fbpic() -> str:
    (file,) = (each for each in added(FBPIC.read_text()) if "import mpishare" in each)
    return BOX.replace("FILE", "\n".join(file))


def dedalus() -> str:
    library, *_ = (lines for lines in added(DEDALUS.read_text()) if "import mpishare" in lines)
    return "\n".join(library) + TRANSPOSES


@pytest.mark.parametrize("program", [veros, fbpic, dedalus], ids=lambda each: each.__name__)
def test_the_lines_of_the_patch_move_cells(program) -> None:
    assert run_right(2, program()).stdout.count("moved") == 2


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

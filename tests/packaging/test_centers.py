"""The version, licence and dependencies of pyproject.toml are those of pages and recipes."""

import ast
import json
import re
import tomllib

import pytest

import mpishare
from tests.helpers.launch import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SPACK = ROOT / "packaging/spack/packages/py_mpishare/package.py"
(EASYBUILD,) = (ROOT / "packaging/easybuild").glob("*.eb")
EXTRAS = {"mpich", "openmpi", "cu12", "cu13", "jax"}
APPTAINER = ROOT / "packaging/apptainer/mpishare.def"
CITATION, CODEMETA = ROOT / "CITATION.cff", ROOT / "codemeta.json"


def easyconfig() -> dict:
    """The assignments of the easyconfig, whose constants are EasyBuild's."""
    found: dict = {"SOURCE_TAR_GZ": "", "SYSTEM": ""}
    exec(EASYBUILD.read_text(), found)
    return found


def at_least(line: str) -> tuple[str, str]:
    name, version = re.fullmatch(r"([\w-]+)>=([\d.]+)", line).groups()
    return name, version


def test_the_version_is_the_same_everywhere() -> None:
    version = mpishare.__version__
    assert f"\nversion: {version}\n" in CITATION.read_text()
    changed = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert changed[1] == version
    assert json.loads(CODEMETA.read_text())["version"] == version
    assert f'version("{version}")' in SPACK.read_text()
    assert easyconfig()["version"] == version
    assert EASYBUILD.name.startswith(f"mpishare-{version}-")


def test_the_licence_is_the_same_everywhere() -> None:
    assert PROJECT["license"] == "BSD-3-Clause"
    text = (ROOT / "LICENSE").read_text()
    assert text.startswith("BSD 3-Clause License")
    assert "Neither the name of the copyright holder" in text
    assert f"license: {PROJECT['license']}\n" in CITATION.read_text()
    assert json.loads(CODEMETA.read_text())["license"].endswith(f"/{PROJECT['license']}")
    assert f'license("{PROJECT["license"]}")' in SPACK.read_text()
    assert f"image.licenses {PROJECT['license']}\n" in APPTAINER.read_text()


def test_spack_asks_for_what_pip_does() -> None:
    text = SPACK.read_text()
    asked = {
        node.args[0].value: node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "depends_on"
        if isinstance(node.args[0], ast.Constant)
    }
    for name, least in map(at_least, PROJECT["dependencies"]):
        assert f"py-{name}@{least}:" in asked
    assert f"python@{PROJECT['requires-python'].removeprefix('>=')}:" in asked
    (cupy, bindings) = PROJECT["optional-dependencies"]["cu12"]
    assert f"py-cupy@{cupy.partition('>=')[2]}:+cuda" in asked
    assert f"py-cuda-bindings@{bindings.partition('==')[2].removesuffix('.*')}:" in asked


def test_easybuild_has_what_pip_asks_for() -> None:
    given = {name.lower(): version for name, version, *_ in easyconfig()["dependencies"]}

    def parts(version: str) -> list[int]:
        return [int(part) for part in version.split(".")]

    least = dict(map(at_least, PROJECT["dependencies"]))
    assert parts(given["mpi4py"]) >= parts(least["mpi4py"])
    cupy, bindings = PROJECT["optional-dependencies"]["cu12"]
    assert parts(given["cupy"]) >= parts(cupy.partition(">=")[2])
    assert given["cuda-python"].startswith(bindings.partition("==")[2].removesuffix("*"))


@pytest.mark.parametrize("path", [SPACK, EASYBUILD, CITATION, CODEMETA], ids=lambda path: path.name)
def test_no_address_is_named_while_pyproject_has_none(path) -> None:
    if "urls" in PROJECT:
        pytest.skip("pyproject.toml has it: packaging/README.md says what repeats it")
    named = re.findall(r"https?://[^\s\"']+", path.read_text())
    assert [
        url for url in named if not url.startswith(("https://w3id.org", "https://spdx.org"))
    ] == []


def test_neither_an_mpi_nor_cupy_is_a_hard_dependency() -> None:
    needed = {re.match(r"[\w-]+", line)[0] for line in PROJECT["dependencies"]}
    assert needed == {"mpi4py", "numpy"}
    assert set(PROJECT["optional-dependencies"]) == EXTRAS


def test_every_extra_that_the_pages_name_exists() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "scripts").rglob("*.md")]
    pages = [page for page in pages if "_build" not in page.parts]
    named = {
        extra.strip()
        for page in pages
        for extras in re.findall(r"'(?:\.|mpishare)\[([\w, -]+)\]'", page.read_text())
        for extra in extras.split(",")
    }
    assert {"mpich", "jax"} <= named <= EXTRAS

"""The conda recipe is one that rattler-build takes, and asks for what pyproject.toml asks for."""

import re
import tomllib

import pytest

import mpishare
from tests.helpers.launch import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


@pytest.fixture(scope="module")
def recipe() -> dict:
    rattler_build = pytest.importorskip("rattler_build", reason="the group build is not installed")
    stage = rattler_build.Stage0Recipe.from_file(ROOT / "recipe" / "recipe.yaml")
    variants = rattler_build.VariantConfig.from_file(ROOT / "recipe" / "variants.yaml")
    (rendered,) = stage.render(variants)
    return rendered.recipe.to_dict()


def plain(line: str) -> str:
    return re.sub(r"\s*([<>=]=?)\s*", r" \1", line)


def test_it_has_the_version_and_the_dependencies(recipe: dict) -> None:
    assert recipe["package"] == {"name": "mpishare", "version": mpishare.__version__}
    wanted = {plain(line) for line in PROJECT["dependencies"]}
    python = plain(f"python {PROJECT['requires-python']}")
    assert set(recipe["requirements"]["run"]) == {*wanted, python}
    backend = {plain(line) for line in PYPROJECT["build-system"]["requires"]}
    assert backend <= {*map(str, recipe["requirements"]["host"])}
    assert recipe["about"]["summary"] == PROJECT["description"]
    assert recipe["about"]["license"] == PROJECT["license"]


def test_one_package_with_the_compiled_part_serves_every_python(recipe: dict) -> None:
    build, needed = recipe["build"], recipe["requirements"]
    assert build["python"]["version_independent"]
    assert "python-abi3 3.11.*" in needed["host"]
    assert any(str(line).startswith("gcc_linux-") for line in needed["build"])


def test_python_is_the_oldest_of_the_classifiers(recipe: dict) -> None:
    named = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert named[0] == PROJECT["requires-python"].removeprefix(">=")
    assert f"python {named[0]}.*" in recipe["requirements"]["host"]

"""Sphinx makes the documentation with this: scripts/docs."""

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import mpishare
from tests.gpu import evidence

project = "mpishare"
author = "the mpishare developers"
copyright = "the mpishare developers"
release = version = mpishare.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc"]
exclude_patterns = ["_build", "_generated"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say them
numpydoc_show_class_members = False
default_role = "py:obj"  # docstrings name what they mean in single backticks
autosummary_generate = False

html_theme = "furo"
html_title = f"mpishare {release}"
html_static_path = ["_static"]
html_css_files = ["mpishare.css"]
html_show_sphinx = False
html_copy_source = False


PACKAGES = ("python", "cupy", "cuda-bindings", "mpi4py", "numpy")


def tested_versions() -> str:
    """The configurations in which the tests ran on GPUs, as a table."""
    heads = ["configuration", "date", "GPUs", "driver", "MPI", "Python", "CuPy", "cuda-bindings",
             "mpi4py", "NumPy", "tests"]  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    runs = evidence.load()["runs"]
    for run in runs:
        versions = run["versions"]
        models = [gpu.rpartition(" GPU-")[0].removeprefix("NVIDIA ") for gpu in run["gpus"]]
        outcomes = [test["outcome"] for test in run["tests"].values()]
        passed, failed = outcomes.count("passed"), len(evidence.failures(run))
        cells = [run["configuration"], run["date"][:10], f"{len(models)} x {models[0]}",
                 run["driver"], " ".join(versions["mpi"].replace("Version:", "").split()),
                 *(versions[name] for name in PACKAGES),
                 f"{passed} passed" + f", {failed} failed" * bool(failed)]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    failed_lines = [
        f"- {run['configuration']} of {run['date'][:10]}: `{test}`, {outcome}"
        for run in runs
        for test, outcome in evidence.failures(run).items()
    ]
    heading = ["", "These tests failed, or did not end:", ""] if failed_lines else []
    return "\n".join([*lines, *heading, *failed_lines, ""])


def unproven_tests() -> str:
    """The GPU tests that are accepted without having passed in every run, each with the reason."""
    found = evidence.load()
    lines = []
    for test, reason in found["unproven"].items():
        results = [run["tests"][test]["outcome"] for run in found["runs"] if test in run["tests"]]
        passed = (
            f"passed in {results.count('passed')} of {len(results)} runs" if results else "not run"
        )
        lines.append(f"- `{test}` ({passed}): {reason}.")
    return "\n".join([*(lines or ["None."]), ""])


def caption_options(_: object, name: str, source: list[str]) -> None:
    """Show what stands behind the language of a block, as on the page of errors: `ranks=2`."""
    if name == "errors":
        options = r"^```python (\S.*)$"
        source[0] = re.sub(
            options, r"```{code-block} python\n:caption: \1\n", source[0], flags=re.M
        )


def setup(app: Any) -> None:
    """Write what is made from other files."""
    app.connect("source-read", caption_options)
    folder = ROOT / "docs" / "_generated"
    folder.mkdir(exist_ok=True)
    (folder / "versions.md").write_text(tested_versions())
    (folder / "unproven.md").write_text(unproven_tests())

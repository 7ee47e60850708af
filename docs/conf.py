"""Sphinx makes the documentation with this: scripts/docs."""

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docutils import nodes
from sphinx.pycode import ModuleAnalyzer

import mpishare
from mpishare.runtime import route
from tests.gpu import evidence

project = "mpishare"
author = "the mpishare developers"
copyright = "the mpishare developers"
release = version = mpishare.__version__

extensions = [
    "myst_parser",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "numpydoc",
]
exclude_patterns = ["_build", "_generated"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
# Copies what is typed, not what is printed.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
maximum_signature_line_length = 80
numpydoc_show_class_members = False
default_role = "py:obj"  # docstrings name what they mean in single backticks
autosummary_generate = False

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"mpishare {release}"
html_static_path = ["_static"]
html_search_scorer = str(ROOT / "docs/_static/scorer.js")
html_css_files = ["mpishare.css"]
html_show_sphinx = False
html_copy_source = False


# `scripts/docs --intersphinx` links to these; without it a build needs no network.
if tags.has("intersphinx"):  # type: ignore[name-defined]  # noqa: F821
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "mpi4py": ("https://mpi4py.readthedocs.io/en/stable", None),
        "cupy": ("https://docs.cupy.dev/en/stable", None),
    }

#: Made by a `Node` or a function, never called by their users.
MADE_BY_OTHERS = {"Attached", "Channel", "Event", "Export", "Frame", "Pool", "Step", "Window"}

PACKAGES = ("python", "cupy", "cuda-bindings", "mpi4py", "numpy")


def tested_versions() -> str:
    """The configurations in which the tests ran on GPUs, as a table, and the tests that failed."""
    heads = ["configuration", "date", "GPUs", "driver", "MPI", "Python", "CuPy", "cuda-bindings",
             "mpi4py", "NumPy", "tests", "today's sources"]  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    runs, sha256, failures = evidence.load(), evidence.sources_sha256(), []
    for run in runs:
        versions, counts = run["versions"], run["counts"]
        models = [gpu.rpartition(" GPU-")[0].removeprefix("NVIDIA ") for gpu in run["gpus"]]
        cells = [run["configuration"], run["date"][:10], f"{len(models)} x {models[0]}",
                 run["driver"], " ".join(versions["mpi"].replace("Version:", "").split()),
                 *(versions[name] for name in PACKAGES),
                 ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count),
                 evidence.state(run, sha256)]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
        failures += [f"- {evidence.title(run)}: `{test}`" for test in run["failures"]]
    heading = ["", "These tests failed, or did not end:", ""] if failures else []
    return "\n".join([*lines, *heading, *failures, ""])


def routes() -> str:
    """The ways of cells to a neighbor, as a table."""
    texts = ModuleAnalyzer.for_module(route.__name__).find_attr_docs()
    names = {name: text for (_, name), text in texts.items()}
    lines = [
        f"| `{value}` | {' '.join(names[name]).strip()} |"
        for name, value in vars(route).items()
        if name in names and isinstance(value, route.Route)
    ]
    return "\n".join(["| route | cells travel |", "|---|---|", *lines, ""])


def on_errors_page(_app: Any, name: str, source: list[str]) -> None:
    """Show what stands behind the language of a block, `ranks=2`; wrap messages in the browser."""
    if name == "errors":
        options = r"^```python (\S.*)$"
        text = re.sub(options, r"```{code-block} python\n:caption: \1\n", source[0], flags=re.M)
        messages = r"(?<=^```text\n)(.*?)(?=\n```$)"
        source[0] = re.sub(
            messages, lambda found: found[1].replace("\n", " "), text, flags=re.M | re.S
        )


def tidy_signature(
    _app: Any, what: str, name: str, _object: Any, _options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """Leave out the arguments by which mpishare itself makes an object; write types by name."""
    if what == "class" and name.rpartition(".")[2] in MADE_BY_OTHERS:
        return "", ""
    return (re.sub(r"<class '(\w+)'>", r"\1", signature), returns) if signature else None


def inline_drawings(app: Any, doctree: nodes.document, _name: str) -> None:
    """Put SVG into the page itself, where it takes the colors of the page's theme."""
    for image in list(doctree.findall(nodes.image)):
        if image["uri"].startswith("figures/") and image["uri"].endswith(".svg"):
            svg = (Path(app.srcdir) / image["uri"]).read_text()
            html = f'<span class="drawing">{svg}</span>'
            image.replace_self(nodes.raw("", html, format="html"))


def find_inherited(_app: Any, module: str) -> tuple[str, dict[str, Any]] | None:
    """Return the source of a module, and where members are that public classes inherit from it."""
    if not module.startswith("mpishare."):
        return None
    analyzer = ModuleAnalyzer.for_module(module)
    analyzer.find_tags()
    tags = dict(analyzer.tags)
    for public in map(mpishare.__dict__.get, mpishare.__all__):
        for base in getattr(public, "__mro__", ())[1:]:
            if base.__module__ == module:
                for name in vars(base):
                    if tag := analyzer.tags.get(f"{base.__qualname__}.{name}"):
                        tags.setdefault(f"{public.__name__}.{name}", tag)
    return analyzer.code, tags


def setup(app: Any) -> None:
    """Write what is made from other files."""
    app.connect("source-read", on_errors_page)
    app.connect("autodoc-process-signature", tidy_signature)
    app.connect("doctree-resolved", inline_drawings)
    app.connect("viewcode-find-source", find_inherited)
    folder = ROOT / "docs" / "_generated"
    folder.mkdir(exist_ok=True)
    (folder / "versions.md").write_text(tested_versions())
    (folder / "routes.md").write_text(routes())

"""The pages build without a warning, and the reference has every public name."""

import inspect
import operator
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest

import mpishare
from tests.gpu import evidence
from tests.helpers.launch import ROOT

pytestmark = pytest.mark.timeout(900)  # whichever test comes first builds the site


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    pytest.importorskip("sphinx", reason="the dependency group docs is not installed")
    folder = tmp_path_factory.mktemp("html")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "-q"]
    done = subprocess.run(
        [*command, "-b", "html", "docs", folder],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def public_names() -> Iterator[list[str]]:
    """What `mpishare` exports and what is public in its classes; inherited names by each class."""
    for name in mpishare.__all__:
        member = getattr(mpishare, name)
        yield [f"mpishare.{name}"]
        if inspect.isclass(member):
            bases = [base for base in member.__mro__ if base.__module__.startswith("mpishare")]
            for each in {each for base in bases for each in vars(base) if not each.startswith("_")}:
                yield [f"mpishare.{base.__name__}.{each}" for base in bases]


def listed_names(html: Path) -> set[str]:
    data = (html / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return set(re.findall(r"^(\S+) py:", zlib.decompress(data).decode(), re.MULTILINE))


def test_each_type_that_signatures_name_is_explained(html) -> None:
    source = (ROOT / "mpishare/memory/types.py").read_text()
    named = re.findall(r"^(?:class )?([A-Z]\w+)(?:: TypeAlias|\()", source, re.MULTILINE)
    assert len(named) > 8
    assert set(named) - listed_names(html) == set()


def test_the_reference_has_every_public_name(html) -> None:
    listed = listed_names(html)
    assert [names[0] for names in public_names() if not listed & set(names)] == []


def test_every_path_of_the_reference_is_one_in_python() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    paths = re.findall(r"^\.\. auto\w+:: (\S+)$", pages, re.MULTILINE)
    assert len(paths) > 30
    for path in paths:
        name = path.removeprefix("mpishare.")
        if not name.startswith("jax."):  # which is imported on its own
            assert operator.attrgetter(name)(mpishare) is not None


def test_every_page_is_in_the_contents(html) -> None:
    index = (html / "index.html").read_text()
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert {page for page in pages if f'href="{page}.html"' not in index} == set()


def text_of(page: Path) -> str:
    """The words of a page of the site."""
    return " ".join(unescape(re.sub(r"<[^>]*>", "", page.read_text())).split())


def test_what_ran_on_gpus_is_shown_with_what_it_proves(html) -> None:
    releases, sha256 = text_of(html / "releases.html"), evidence.sources_sha256()
    runs = evidence.load()
    assert runs
    for run in runs:
        row = rf"{run['configuration']} {run['date'][:10]} .*? {run['counts']['passed']} passed"
        assert re.search(f"{row}[ ,a-z0-9]* {evidence.state(run, sha256)}", releases), row
        assert all(test in releases for test in run["failures"])


def test_every_example_is_on_its_page() -> None:
    page = (ROOT / "docs" / "examples.md").read_text()
    shown = re.findall(
        r"^```\{literalinclude\} \.\./scripts/examples/(\w+)\.py$", page, re.MULTILINE
    )
    files = (ROOT / "scripts" / "examples").glob("[0-9]*.py")
    assert shown == sorted(file.stem for file in files)


def test_an_inherited_member_links_to_its_source(html) -> None:
    page = (html / "reference/halo-exchange.html").read_text()
    (module,) = re.findall(r'href="\.\./(_modules/\S+?\.html)#HaloExchange\.exchange"', page)
    assert 'id="HaloExchange.exchange"' in (html / module).read_text()

"""The faults of MPI libraries that a page reports are there, in the versions that it names."""

import re

import pytest

from tests.docs.pages import ROOT, blocks
from tests.helpers.launch import run_ranks

FAULTS = [each for each in blocks(ROOT / "docs/mpi-faults.md") if each.language in {"py", "text"}]
PROGRAMS = [each for each in FAULTS if each.language == "py"]


def named(text: str) -> str:
    return text.partition("\n")[0]


@pytest.mark.both_mpis
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: named(each.text).split()[-1])
def test_a_program_prints_what_the_page_says(program) -> None:
    after = FAULTS[FAULTS.index(program) + 1 :]
    shown = {named(each.text): each.text for each in after[:2]}
    assert len(shown) == 2
    ranks = int(re.search(r"-n (\d)", program.text)[1])
    done = run_ranks(ranks, program.text)
    assert done.returncode == 0, done.stderr
    library = named(done.stdout)
    if library not in shown:
        pytest.skip(f"the page has nothing on {library}")
    assert done.stdout == shown[library]

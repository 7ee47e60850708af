"""Every program of the pages runs and prints what they say; every command runs, or has a reason."""

import ast
import re
import sys
from textwrap import indent
from urllib.parse import unquote

import pytest

from tests.docs.pages import PAGES, ROOT, Block, blocks, commands, programs
from tests.helpers import autograd
from tests.helpers.launch import run_ranks
from tests.helpers.shared_job import play_shared

HOST = {"MPISHARE_BACKEND": "host"}

#: Commands that no test of this folder starts, and why not.
NOT_RUN = {
    "python -m mpishare.mps mpirun -n 4 python -m mpi4py program.py": (
        "tests/tools/test_with_mps.py"
    ),
    "mpirun -n 4 python scripts/applications/heat3d.py --n 64 --steps 50 --compare --check": (
        "20 s; tests/applications runs it with fewer steps"
    ),
    "pip install '.[mpich,cu13]'": "tests/packaging installs the wheel; CuPy is 350 MB",
    "scripts/ports/veros /tmp/veros": "minutes and a network; test_ports.py runs the patch",
    "scripts/ports/distdl /tmp/distdl": "a network, 5 GB",
    "scripts/ports/fbpic /tmp/fbpic": "half an hour and a network",
    "scripts/ports/heat /tmp/heat": "a network, 5 GB",
    "scripts/ports/dedalus /tmp/dedalus": "minutes and a network; test_ports.py runs the patch",
    "scripts/ports/quatrex /tmp/quatrex": "QuaTrEx, and a network",
    "scripts/ports/mpi4py_fft /tmp/mpi4py_fft": "a network",
    "nvcc -std=c++17 -arch=sm_90 -cubin "
    '$(python -c "import mpishare; print(*mpishare.device.include())") kernels.cu': (
        "tests/device/test_nvcc.py, where nvcc is"
    ),
    "scripts/bench --help": "tests/bench/test_cli.py",
    "mpirun -n 28 python -m mpi4py scripts/lib/rank_counts.py docs/results/ranks-host.jsonl": (
        "writes a result; tests/bench/test_rank_counts.py runs it"
    ),
    "mpirun -n 4 python scripts/applications/cg.py --n 32 --check": "tests/applications/test_cg.py",
}


@pytest.mark.timeout(300)  # on a busy machine PyTorch takes a minute to be imported
@pytest.mark.parametrize(("block", "shown"), programs(), ids=lambda each: getattr(each, "name", ""))
def test_a_program_prints_what_the_page_says(block: Block, shown: str | None) -> None:
    assert shown is not None, "a program without what it prints"
    if "import torch\n" in block.text:
        pytest.importorskip("torch", reason="PyTorch is not installed")
    done = play_shared(4, block.text, env=HOST, timeout_s=120)
    assert done.returncode == 0, done.describe()
    assert done.stdout == shown


@pytest.mark.timeout(120)
def test_the_three_lines_are_those_of_an_application_and_all_are_right() -> None:
    name = "scripts/applications/jacobi2d.py"
    (block,) = [b for p in PAGES for b in blocks(p) if b.text.startswith(f"# of {name}")]
    program = ROOT / name
    made = [line.partition(" = ")[2].partition("  #")[0] for line in block.text.splitlines()[1:]]
    assert len(made) == 3
    assert all(f"return {line}\n" in program.read_text() for line in made)
    for way in (["--staged", "naive"], ["--staged", "pinned"], []):
        command = [sys.executable, str(program), "--n", "16", "--steps", "20", "--check", *way]
        done = run_ranks(4, command)
        assert done.returncode == 0, done.stderr
        assert "checked" in done.stdout


def test_what_is_quoted_is_in_the_application() -> None:
    """The lines of an iteration stand before those of the loop that calls it."""
    file = "scripts/applications/cg.py"
    (block,) = [b for p in PAGES for b in blocks(p) if b.text.startswith(f"# of {file}")]
    *quoted, last = block.text.splitlines()[1:]
    text = (ROOT / file).read_text()
    assert indent("\n".join(quoted), " " * 8) + "\n" in text
    assert f"        {last}\n" in text


OVERLAP = """
import numpy as np
import mpishare
from mpi4py import MPI

with mpishare.Node(backend="host") as node:
    cart = MPI.COMM_WORLD.Create_cart([2, 2], periods=[True, False])
    u, found, expected = np.random.default_rng(node.rank).random((3, 9, 12))
    halo = mpishare.HaloExchange(cart, u, width=1, node=node)

    def compute(part, into=found):
        rows, columns = part
        for step in (-1, 1):
            into[part] += u[slice(rows.start + step, rows.stop + step), columns]
            into[part] += u[rows, slice(columns.start + step, columns.stop + step)]

    found[...] = expected
{}
    halo.exchange(u)
    compute(halo.owned, expected)
    assert (found == expected).all()
    halo.close()
"""


@pytest.mark.timeout(60)
def test_the_step_that_overlaps_computes_each_cell_once() -> None:
    (block,) = [b for p in PAGES for b in blocks(p) if b.text.startswith("halo.start(u)")]
    assert all(name in block.text for name in ("start", "interior", "wait", "shell"))
    done = run_ranks(4, OVERLAP.format(indent(block.text, "    ")))
    assert done.returncode == 0, done.stderr


def test_the_function_for_pytorch_is_that_of_the_example() -> None:
    (program,) = [each.text for each, _ in programs() if each.page == autograd.PAGE]
    expected = autograd.source_of(autograd.EXAMPLE.read_text(), "Exchange")
    assert autograd.source_of(program, "Exchange") == expected


def test_every_command_is_run_or_has_a_reason() -> None:
    of_readme = {c for c, found in commands().items() if found[0].page.name == "README.md"}
    unknown = commands().keys() - of_readme - NOT_RUN.keys()
    # A program that a page saves under a name is run by the test of programs.
    saved = {c for c in unknown if re.fullmatch(r"mpirun -n 4 python -m mpi4py \w+\.py", c)}
    assert unknown - saved == set()
    assert NOT_RUN.keys() <= commands().keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / unquote(target)).exists(), target


def test_the_lines_of_each_library_are_counted_right() -> None:
    text = (ROOT / "docs/comparison.md").read_text()
    rows = re.findall(r"^\| .*? \| (\d+), (\d+) \|", text, re.MULTILINE)
    counted = []
    for code in re.findall(r"^```(?:py|c)\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL):
        once, _, step = code.rpartition("\n\n")
        counted.append(tuple(str(len(part.splitlines())) for part in (once, step)))
    assert counted == rows


def test_the_lines_of_each_example_are_counted_right() -> None:
    """Those of code in the table of examples.md: no comments, docstrings and empty lines."""
    text = (ROOT / "docs/examples.md").read_text()
    counts = re.findall(r"\[\d+\]\(#(\w+)\), (\d+)", text)
    assert len(counts) > 10
    wrong = {name: said for name, said in counts if lines_of_code(name) != int(said)}
    assert not wrong


def lines_of_code(example: str) -> int:
    source = (ROOT / f"scripts/examples/{example}.py").read_text()
    empty = {
        number
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node) is not None
        for number in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(re.match(r"\s*[^\s#]", line)) and n not in empty for n, line in lines)

"""The README is short, its commands run in order, its figures are those of the runs."""

import json
import math
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT, blocks
from tests.docs.test_pages import NOT_RUN
from tests.gpu.evidence import git
from tests.helpers.launch import OF_A_JOB, run_ranks

FILE = ROOT / "README.md"
README = FILE.read_text()


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 150
    for block in blocks(FILE):
        if block.is_program:
            assert len([line for line in block.text.splitlines() if line.strip()]) <= 12


def script() -> str:
    """Every command of the README that is run, and the programs under their names, in order."""
    lines, program = ["set -euo pipefail"], ""
    for block in blocks(FILE):
        if block.is_program:
            program = block.text
        if block.language != "console":
            continue
        for line in block.text.splitlines():
            command = line.removeprefix("$ ").partition("  #")[0].strip()
            if command in NOT_RUN:
                continue
            saved = re.fullmatch(r"mpirun .* (\w+\.py)", command)
            if saved and "scripts/" not in command:
                lines.append(f"cat > {saved[1]} <<'END'\n{program}END")
            lines += [f"echo '== {command}'", command]
    return "\n".join(lines)


@pytest.mark.limit(240)
def test_the_commands_run_in_order_in_a_fresh_clone(tmp_path) -> None:
    """In a copy of the files that git knows, with nothing of the environment of this test."""
    clone = tmp_path / "clone"
    listed = git(ROOT, "ls-files", "-co", "--exclude-standard", "-z")
    if listed is None:
        pytest.skip("no git here, or no repository of this user's")
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, clone / name)
    paths = os.environ["PATH"].split(os.pathsep)
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith((*OF_A_JOB, "OMPI_", "PYTHON", "MPI", "VIRTUAL_ENV"))
    }
    env["PATH"] = os.pathsep.join(path for path in paths if not path.startswith(str(ROOT)))
    done = subprocess.run(
        ["bash", "-c", script()], cwd=clone, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for shown in (block.text for block in blocks(FILE) if block.language == "text"):
        assert shown in done.stdout


def test_the_figures_are_those_of_the_runs() -> None:
    """Times and ratios in the text and in the table are those of the quoted runs, rounded."""
    runs = {name: load(name) for name in ("gpus2", "onegpu-ranks4-mps", "onegpu-ranks4")}
    gpus = runs["gpus2"]
    small = [ratio(gpus, size) for size in SIZES[:5]]
    text = " ".join(README.split())
    assert f"takes {gpus[8, 'private fields']:.1f} µs up to 64 KiB" in text
    assert max(gpus[size, "private fields"] for size in SIZES[:4]) < 5.55
    assert f"{min(small):.2f} to {max(small):.2f} of the time of the fastest" in text
    assert (
        f"{ratio(gpus, SIZES[5]):.2f} at 16 MiB and {ratio(gpus, SIZES[6]):.2f} at 64 MiB" in text
    )
    assert f"{min(small):.2f} to {ratio(gpus, SIZES[5]):.2f} of the fastest other library" in text
    shared = [ratio(runs["onegpu-ranks4-mps"], size) for size in SIZES[:6]]
    assert f"MPS: {min(shared):.2f} to {max(shared):.2f} of the time of staging" in text
    assert f"without MPS: {runs['onegpu-ranks4'][8, 'private fields']:.0f} µs" in text


def test_the_figures_beside_the_newest_libraries_are_those_of_the_run() -> None:
    """In the README, and in the words of docs/performance.md above the tables."""
    text = " ".join(README.split())
    page = " ".join((ROOT / "docs/performance.md").read_text().partition("<!--")[0].split())
    run, late = (load("newest-gpus2", clock=clock) for clock in ("throughput", "latency"))
    sizes = sorted({nbytes for nbytes, _ in run})
    own = [run[nbytes, "own"] for nbytes in sizes[:3]]
    assert f"{min(own):.1f} to {max(own):.1f} µs, " in text
    assert f"{min(own):.1f} to {max(own):.1f} µs up to 64 KiB" in page
    over = [run[nbytes, "own"] / run[nbytes, "best"] for nbytes in sizes]
    assert f"{min(over):.2f} to {max(over):.2f} of the fastest" in text
    assert f"{over[-2]:.2f} of the best at 16 MiB, {over[-1]:.2f} at 64 MiB" in page
    assert f"{min(over):.2f} to {max(over[:-1]):.2f} of a kernel written by hand" in text
    over = [late[nbytes, "own"] / late[nbytes, "best"] for nbytes in sizes]
    assert f"with a synchronize after each exchange {min(over):.2f} to {max(over):.2f}" in text
    ring = load("newest-gpus2", case="ring")
    over = [ring[nbytes, "own"] / ring[nbytes, "best"] for nbytes in sizes[:4]]
    assert f"{min(over):.1f} to {max(over):.1f} times the time of a kernel" in text
    own = [ring[nbytes, "own"] for nbytes in sizes[:4]]
    assert f"{min(own):.0f} to {max(own):.0f} µs up to 1 MiB" in page


def test_the_figures_of_messages_to_other_nodes_are_those_of_the_run() -> None:
    text = " ".join(README.split())
    slabs, blocks = (load("messages-gpus2", case=f"messages{axes}") for axes in ("1d", "3d"))
    over = [
        run[nbytes, "messages"] / run[nbytes, arm]
        for run, arms in ((slabs, {"mpi", "mpi packed"}), (blocks, {"mpi"}))
        for nbytes, arm in run
        if arm in arms
    ]
    assert f"{min(over):.1f} to {max(over):.1f} of the same messages sent by hand" in text
    host = [slabs[n, "through the host"] / slabs[n, "messages"] for n in (1 << 20, 1 << 26)]
    assert f"{host[0]:.0f} times as long at 1 MiB, {host[1]:.0f} times at 64 MiB" in text


SIZES = (8, 512, 4096, 65536, 1 << 20, 1 << 24, 1 << 26)


def load(
    name: str, case: str = "halo1d", clock: str = "throughput"
) -> dict[tuple[int, str], float]:
    """The times of a case by size and arm; "own" is our fastest, "best" the fastest baseline."""
    rows = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())["rows"]
    found: dict[tuple[int, str], float] = {}
    for row in rows:
        if (row["case"], row["clock"], row["ok"]) == (case, clock, True):
            found[row["nbytes"], row["arm"]] = row["median_us"]
            fastest = row["nbytes"], {"rival": "best"}.get(row["kind"], row["kind"])
            found[fastest] = min(row["median_us"], found.get(fastest, math.inf))
    return found


def ratio(run: dict[tuple[int, str], float], nbytes: int) -> float:
    return run[nbytes, "private fields"] / run[nbytes, "best"]


def test_every_script_it_names_is_there() -> None:
    named = set(re.findall(r"\b(scripts/[\w-]+)(?!/)\b", README)) - {"scripts/examples"}
    assert {"scripts/bench", "scripts/docs", "scripts/test", "scripts/with-mps"} <= named
    for name in named:
        assert (ROOT / name).stat().st_mode & 0o111, name


def test_every_test_that_a_page_names_is_there() -> None:
    known = set()
    for path in ROOT.glob("tests/**/*.py"):
        known |= {path.stem, *re.findall(r"def (test_\w+)", path.read_text())}
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "tests" / "README.md"]
    named = {name: page for page in pages for name in re.findall(r"\btest_\w+", page.read_text())}
    assert len(named) > 100
    assert {name: page.name for name, page in named.items() if name not in known} == {}


def test_info_is_shown_as_it_prints() -> None:
    """The report that getting-started shows has the form of a real one."""
    done = run_ranks(2, [sys.executable, "-m", "mpishare.info"], timeout_s=60)
    assert done.returncode == 0, done.stderr
    page = ROOT / "docs" / "getting-started.md"
    (shown,) = [block.text for block in blocks(page) if block.text.startswith("node ")]
    for text in (shown, done.stdout):
        lines = text.splitlines()
        assert re.match(r"node \S+: 2 ranks, backend (cuda|host)", lines[0])
        assert re.match(r"  rank 0, pid \d+.*, leader$", lines[1])
        assert lines[3].split() == ["from", "\\", "to", "0", "1"]
        assert [row.split()[0] for row in lines[4:6]] == ["0", "1"]
        assert all("self" in row for row in lines[4:6])

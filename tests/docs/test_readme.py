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
    git = ["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(git, capture_output=True, text=True, check=True).stdout
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
    hosts = [load(name) for name in ("cpu-mpich", "cpu-openmpi")]
    for fields, said in (
        ("window fields", "in windows: {} to {} of"),
        ("private fields", "{} to {} of"),
    ):
        found = [run[size, fields] / run[size, "sendrecv"] for run in hosts for size in LARGE]
        words = said.format(*(f"{value:.2f}".rstrip("0") for value in (min(found), max(found))))
        assert f"{words} `Sendrecv` from 64 KiB" in text
    assert f"up to {max(ratio(run, 8) for run in hosts):.1f} of the fastest MPI form" in text


SIZES = (8, 512, 4096, 65536, 1 << 20, 1 << 24, 1 << 26)
LARGE = (65536, 1 << 20)


def load(name: str) -> dict[tuple[int, str], float]:
    """The times of the 1-D halo back to back, by size and variant; "best" is the best baseline."""
    rows = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())["rows"]
    found: dict[tuple[int, str], float] = {}
    for row in rows:
        if (row["case"], row["clock"], row["ok"]) == ("halo1d", "throughput", True):
            found[row["nbytes"], row["arm"]] = row["median_us"]
            if row["kind"] == "rival":
                best = row["nbytes"], "best"
                found[best] = min(row["median_us"], found.get(best, math.inf))
    return found


def ratio(run: dict[tuple[int, str], float], nbytes: int) -> float:
    return run[nbytes, "private fields"] / run[nbytes, "best"]


def test_every_script_it_names_is_there() -> None:
    named = set(re.findall(r"\b(scripts/[\w-]+)(?!/)\b", README)) - {"scripts/examples"}
    assert {"scripts/bench", "scripts/docs", "scripts/test", "scripts/with-mps"} <= named
    for name in named:
        assert (ROOT / name).stat().st_mode & 0o111, name


def test_info_is_shown_as_it_prints() -> None:
    """The report that getting-started shows has the form of a real one."""
    done = run_ranks(2, [sys.executable, "-m", "mpishare.info"], timeout_s=60)
    assert done.returncode == 0, done.stderr
    page = ROOT / "docs" / "getting-started.md"
    (shown,) = [block.text for block in blocks(page) if block.text.startswith("node ")]
    for text in (shown, done.stdout):
        lines = text.splitlines()
        assert re.match(r"node \S+: 2 ranks, backend (cuda|host)", lines[0])
        assert re.match(r"  rank 0 \(given rank 0\), pid \d+.*, leader$", lines[1])
        assert lines[3].split() == ["from", "\\", "to", "0", "1"]
        assert [row.split()[0] for row in lines[4:6]] == ["0", "1"]
        assert all("self" in row for row in lines[4:6])

"""The README is short, its commands run in order, its figures are those of the runs."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from mpishare.bench.cases import CASES, default_cases
from tests.docs.pages import ROOT, blocks
from tests.docs.test_pages import NOT_RUN
from tests.gpu.evidence import git
from tests.helpers.launch import OF_A_JOB, run_ranks

FILE = ROOT / "README.md"
README = FILE.read_text()
BENCH = "scripts/bench"
SETUP_S = 30  # of processor, to make its environment


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 110
    for block in blocks(FILE):
        if block.is_program:
            assert len([line for line in block.text.splitlines() if line.strip()]) <= 12


def test_it_is_described_in_one_way() -> None:
    words = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"].lower()
    for where in ("README.md", "CITATION.cff", "codemeta.json", "mpishare/__init__.py"):
        assert words in (ROOT / where).read_text().lower(), where
    title, _, summary = (ROOT / "paper/paper.md").read_text().lower().partition("# summary\n")
    for text in (title, summary.partition("\n# ")[0]):
        assert words in " ".join(text.split())


def script() -> str:
    """Every command of the README that is run, and the programs under their names, in order."""
    lines, program = ["set -euo pipefail", "TIMEFORMAT='processor %U %S'"], ""
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
            lines += [f"echo '== {command}'", f"time {command}" if command == BENCH else command]
    return "\n".join(lines)


@pytest.mark.whole
@pytest.mark.timeout(480)
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
    _, _, report = done.stdout.partition(f"== {BENCH}\n")
    check_default_benchmark(report.partition("\n== ")[0], done.stderr)


def check_default_benchmark(report: str, stderr: str) -> None:
    """All default cases ran and were checked, in the half a minute that the README promises.

    That of each rank's processor: on a busy machine the clock on the wall tells nothing.
    """
    assert report.startswith("mpishare bench"), report
    assert "every result checked" in " ".join(report.split()), report
    titles = {line.split(":")[0] for line in report.splitlines()}
    assert set(CASES) & titles == set(default_cases()), report
    assert "not run" not in report, report
    assert "Traceback" not in stderr, stderr
    ranks = min(max(len(os.sched_getaffinity(0)), 2), 4)
    (seconds,) = re.findall(r"^processor (.+) (.+)$", stderr, re.MULTILINE)
    assert sum(map(float, seconds)) < SETUP_S + 30 * ranks, stderr


def test_the_figures_are_those_of_the_runs() -> None:
    """Times and ratios in the text and in the table are those of the quoted runs, rounded."""
    text = " ".join(README.split())
    run, late = (load("gpus2", clock=clock) for clock in ("throughput", "latency"))
    sizes = sorted({nbytes for nbytes, _ in run})
    assert f"any arrays takes {span([run[n, 'private fields'] for n in sizes[:3]], 1)} µs" in text
    *small, middle, large = over = [run[n, "own"] / run[n, "library"] for n in sizes]
    said = f"{span(small)} up to 1 MiB, {middle:.2f} at 16 MiB and {large:.2f} at 64 MiB"
    assert f"over the fastest library's is {said}" in text
    assert f"up to 16 MiB: {span(over[:-1])} of the fastest library" in text
    four = load("gpus4", case="halo1d")
    on_four = four[sizes[-1], "own"] / four[sizes[-1], "library"]
    said = f"({large:.2f} of PyTorch's symmetric memory, {on_four:.2f} on four GPUs, "
    assert said in text
    by_mpi = load("mpi-gpus2")
    *small, large = [by_mpi[n, "private fields"] / by_mpi[n, "mpi"] for n in sizes]
    assert f"of the fastest library, {span(small)} of CUDA-aware MPI" in text
    assert f", {large:.2f} of CUDA-aware MPI)" in text
    by_hand, after_each = (
        [each[n, "own"] / each[n, "by hand"] for n in sizes] for each in (run, late)
    )
    assert f"windows it is {span(by_hand)}, and {span(after_each)} with a synchronize" in text
    swap = load("kernels-gpus2", case="swap")
    few = sorted({nbytes for nbytes, _ in swap})[:3]

    def least(nbytes: int, word: str) -> float:
        return min(us for (n, arm), us in swap.items() if n == nbytes and arm.startswith(word))

    halo, nccl, nvshmem, kernel = (
        f"{least(few[0], word):.1f}" for word in ("halo", "nccl", "nvshmem", "kernel")
    )
    assert f"by a `HaloExchange`: {halo} µs each, twenty in one graph" in text
    assert f"on NCCL's windows takes {nccl}, one of NVSHMEM {nvshmem}, and one of yours" in text
    assert f"on a window {kernel} |" in text
    calls = [swap[n, arm] / least(n, "nccl") for n in few for arm in ("fence", "post .. wait")]
    assert f"order them: {span(calls, 1)} of a kernel on NCCL's windows" in text
    ring = load("gpus2", case="ring")
    fences = [ring[n, "window fence"] / ring[n, "library"] for n in sizes[:4]]
    assert f"in a ring and a fence {span(fences, 1)} of the fastest library" in text
    shared, alone = load("onegpu-ranks4-mps"), load("onegpu-ranks4")
    over = [us / shared[n, "best"] for (n, arm), us in shared.items() if arm == "private fields"]
    assert f"MPS: {span(over)} of staging" in text
    assert f"without MPS: {alone[8, 'private fields']:.0f} µs" in text


def test_the_steps_are_those_of_the_applications() -> None:
    runs = {}
    for line in (ROOT / "docs" / "results" / "applications.jsonl").read_text().splitlines():
        run = json.loads(line)
        if run["backend"] == "cuda" and "pinned_step_us" in run:
            runs[run["program"]] = run
    jacobi, heat = runs["jacobi2d"], runs["heat3d"]
    for name, run, end in (("Jacobi's method", jacobi, ""), ("heat", heat, "_without_overlap_us")):
        of = [run[f"{each}_step{end or '_us'}"] for each in ("pinned", "mpishare")]
        (row,) = [line for line in README.splitlines() if line.startswith(f"| [{name}]")]
        assert [each.strip() for each in row.split("|")[2:5:2]] == [f"{us:.0f} µs" for us in of]
    solves = {arm: us for (_, arm), us in load("sums-gpus2", case="cg").items()}
    times = (f"{solves[arm]:.0f} µs" for arm in ("staged", "nccl graph", "one graph"))
    (row,) = (line for line in README.splitlines() if line.startswith("| [conjugate gradients]"))
    assert f"| {' | '.join(times)} |" in row
    for code, step in (("FBPIC", "a step;"), ("DistDL", "training step, 8 x 32 x 128 x 128")):
        times = (ROOT / f"docs/ports/times/{code.lower()}-gpus2.txt").read_text().splitlines()
        *_, line = (each for each in times if each.startswith(f"| {step}"))
        staged, ours = (f"{int(us) / 1000:.1f} ms" for us in line.split(" | ")[1:3])
        (row,) = (each for each in README.splitlines() if each.startswith(f"| [{code}]"))
        assert f"| {staged} | | {ours} |" in row


def test_the_words_of_performance_are_those_of_the_run() -> None:
    page = " ".join((ROOT / "docs/performance.md").read_text().split())
    run, ring = (load("gpus2", case=case) for case in ("halo1d", "ring"))
    sizes = sorted({nbytes for nbytes, _ in run})
    private, windows = (
        span([run[n, arm] for n in sizes[:3]], 1) for arm in ("private fields", "window fields")
    )
    assert f"{private} µs up to 64 KiB for any arrays, {windows} for fields in windows" in page
    by_hand = span([run[n, "by hand"] for n in sizes[:3]], 1)
    assert f"written by hand on NCCL's windows takes {by_hand}: mpishare takes" in page
    over = [f"{run[n, 'own'] / run[n, 'by hand']:.2f}" for n in sizes[:3]]
    by_mpi = load("mpi-gpus2")
    other = span([by_mpi[n, "own"] / by_mpi[n, "by hand"] for n in sizes[:3]])
    said = f"{over[0]} of it at 8 B, {over[1]} at 4 KiB and {over[2]} at 64 KiB, and {other} by"
    assert said in page
    few = span([by_mpi[n, "private fields"] for n in sizes[:3]], 1)
    messages = span([by_mpi[n, "mpi"] for n in sizes[:3]], 0)
    assert f"had {few} µs up to 64 KiB for any arrays, and {messages} for CUDA-aware MPI" in page
    over = [run[n, "own"] / run[n, "best"] for n in sizes]
    assert f"{over[-2]:.2f} of the best at 16 MiB, {over[-1]:.2f} at 64 MiB" in page
    fences, pairs = (
        span([ring[n, arm] for n in sizes[:4]], 0) for arm in ("window fence", "window pairwise")
    )
    assert f"a fence take {fences} µs, the four calls in place of the fence {pairs};" in page


def test_the_figures_of_messages_to_other_nodes_are_those_of_the_run() -> None:
    text = " ".join(README.split())
    slabs, blocks = (load("messages-gpus2", case=f"messages{axes}") for axes in ("1d", "3d"))
    over = [
        run[nbytes, "messages"] / us
        for run in (slabs, blocks)
        for (nbytes, arm), us in run.items()
        if arm == "mpi"
    ]
    assert f"{span(over, 1)} of the same messages sent by hand" in text
    some, many = (slabs[n, "by nccl"] / slabs[n, "through the host"] for n in (1 << 20, 1 << 26))
    said = f"{some:.1f} of messages through the host at 1 MiB, {many:.2f} at 64 MiB"
    assert f"by NVLink {said}" in text


def load(
    name: str, case: str = "halo1d", clock: str = "throughput"
) -> dict[tuple[int, str], float]:
    """The times of a case by size and arm, and the fastest of ours and of the baselines.

    "own", and "best" of all baselines; of these "by hand" the kernel, "library" what is called.
    """
    rows = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())["rows"]
    found: dict[tuple[int, str], float] = {}
    for row in rows:
        if (row["case"], row["clock"], row["ok"]) == (case, clock, True):
            arm, kinds = row["arm"], [row["kind"]]
            found[row["nbytes"], arm] = row["median_us"]
            if row["kind"] == "rival":
                kinds = ["best", "by hand" if arm.startswith("nccl device") else "library"]
            for kind in kinds:
                key = row["nbytes"], kind
                found[key] = min(row["median_us"], found.get(key, math.inf))
    return found


def span(values: list[float], digits: int = 2) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def test_every_script_it_names_is_there() -> None:
    named = set(re.findall(r"\b(scripts/[\w-]+)(?!/)\b", README)) - {"scripts/examples"}
    assert {"scripts/bench", "scripts/docs", "scripts/test"} <= named
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
    done = run_ranks(2, [sys.executable, "-m", "mpishare.info"])
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

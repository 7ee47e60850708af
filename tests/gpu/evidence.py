"""What was seen to pass on GPUs, kept in evidence.tsv, since no GPU is there when code changes.

python -m tests.gpu.evidence check
    Fails when a GPU test (marked `gpu`, as all in *_gpu.py are) has not passed in a run of the
    file, or failed in one, or when a run was cut off. Tests that the file names as unproven, each
    with the reason, are accepted, and printed; one that needs no exemption any more is an error.
    Sources that have changed since a run are reported; that is no failure.
python -m tests.gpu.evidence record --configuration NAME --ranks N [--mps] [--masks] OUTCOMES...
    Adds a run from files that `--outcomes` wrote, in place of the last such run, and prints its
    verdict. Beside PART.jsonl, PART.end says how that part ended: "cut off after 180 s".

The file consists of blocks, with an empty line between them: the header of each run (a key and its
JSON value per line), the unproven tests (test and reason, with a tab between; they are written by
hand), and a table with a row per test and a column per run. A
cell is the outcome and the seconds, rounded, where they are not 0; "-": the test was not run.
"""

import argparse
import collections
import contextlib
import fcntl
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("evidence.tsv")
MOST_SAID = 10
ABSENT = "-"
CUT_OFF = "cut off"
PACKAGES = ("cupy", "cuda-bindings", "mpi4py", "numpy")


def git(root: Path, *arguments: str) -> str | None:
    """What git says, None where there is no git or no repository."""
    try:
        done = subprocess.run(
            ["git", "-C", root, *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def sources_sha256(root: Path = ROOT) -> str:
    """One hash over paths and contents of mpishare/ and tests/, less the evidence itself."""
    listed = git(root, "ls-files", "-co", "--exclude-standard", "-z", "--", "mpishare", "tests")
    if listed is not None:
        files = {root / name for name in listed.split("\0") if name}
    else:
        found = [path for folder in ("mpishare", "tests") for path in (root / folder).rglob("*")]
        built = (".pyc", ".so")
        files = {path for path in found if path.suffix not in built}
    total = hashlib.sha256()
    for path in sorted(files):
        name = path.relative_to(root).as_posix()
        if path.is_file() and name != "tests/gpu/evidence.tsv":
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{name}\0{content}\n".encode())
    return total.hexdigest()


def loads(text: str) -> dict:
    """Return {"unproven": {test: reason}, "runs": [header and {"tests": {test: result}}]}."""
    *headers, unproven, table = [block.splitlines() for block in text.split("\n\n")]
    runs = []
    for header in headers:
        pairs = [line.split("\t") for line in header]
        runs.append({key: json.loads(value) for key, value in pairs} | {"tests": {}})
    for row in table[1:]:
        test, *cells = row.split("\t")
        for run, cell in zip(runs, cells, strict=True):
            if cell != ABSENT:
                outcome, _, seconds = cell.partition(" ")
                run["tests"][test] = {"outcome": outcome, "seconds": int(seconds or 0)}
    rows = (line.partition("\t") for line in unproven[1:])
    return {"unproven": {test: reason for test, _, reason in rows}, "runs": runs}


def dumps(evidence: dict) -> str:
    runs = evidence["runs"]
    blocks = [
        [f"{key}\t{json.dumps(value)}" for key, value in run.items() if key != "tests"]
        for run in runs
    ]
    unproven = [f"{test}\t{reason}".strip() for test, reason in evidence["unproven"].items()]
    blocks.append(["unproven", *unproven])
    titles = [f"{run['configuration']} on {len(run['gpus'])}" for run in runs]
    table = ["\t".join(["test", *titles])]
    for test in sorted({test for run in runs for test in run["tests"]}):
        table.append("\t".join([test, *(cell(run["tests"].get(test)) for run in runs)]))
    return "\n\n".join("\n".join(block) for block in [*blocks, table]) + "\n"


def cell(result: dict | None) -> str:
    if result is None:
        return ABSENT
    seconds = round(result["seconds"])
    return f"{result['outcome']} {seconds}" if seconds else result["outcome"]


def load(file: Path = FILE) -> dict:
    return loads(file.read_text()) if file.exists() else {"unproven": {}, "runs": []}


def add(evidence: dict, run: dict) -> None:
    """Put `run` in the place of the last one of its configuration and number of GPUs."""

    def key(of: dict) -> tuple:
        return of["configuration"], len(of["gpus"])

    others = [other for other in evidence["runs"] if key(other) != key(run)]
    evidence["runs"] = sorted([*others, run], key=key)


def problems(evidence: dict, gpu_tests: list[str], sha256: str) -> tuple[list[str], list[str]]:
    """What makes `check` fail, and what it only says."""
    errors, notes = [], []
    unproven = evidence["unproven"]
    passed: set[str] = set()
    failed: set[str] = set()
    for run in evidence["runs"]:
        where = f"{run['configuration']} of {run['date']}"
        passed |= {test for test, result in run["tests"].items() if result["outcome"] == "passed"}
        bad = failures(run)
        failed |= bad.keys()
        for test in sorted(bad):
            if test in unproven:
                notes.append(f"UNPROVEN, {bad[test]} in {where}: {test} ({unproven[test]})")
            else:
                errors.append(f"{test}: {bad[test]} in {where}")
        cut_off = [f"part {part} was {end}" for part, end in run["parts"].items() if CUT_OFF in end]
        errors += [f"{text} in {where}" for text in cut_off]
        if not run["ok"] and not bad and not cut_off:
            errors.append(f"{where} did not end well")
        if run["sources_sha256"] != sha256:
            notes.append(f"the sources have changed since {where}")
    for test in sorted(set(gpu_tests) - passed):
        if test in unproven:
            notes.append(f"UNPROVEN, passed on no GPU yet: {test} ({unproven[test]})")
        else:
            errors.append(f"{test}: not seen to pass on a GPU; scripts/test-gpu adds a run")
    for test, reason in unproven.items():
        if not reason:
            errors.append(f"{test}: unproven without a reason")
        if test not in failed | (set(gpu_tests) - passed):
            errors.append(f"{test}: needs no place among the unproven tests any more")
    return errors, notes


def failures(run: dict) -> dict[str, str]:
    """The tests of a run that neither passed nor were skipped, with their outcomes."""
    outcomes = {test: result["outcome"] for test, result in run["tests"].items()}
    return {test: o for test, o in outcomes.items() if o not in ("passed", "skipped")}


def gpu_tests() -> list[str]:
    """The name of every GPU test there is, collected by pytest."""
    import pytest

    class Collector:
        def __init__(self) -> None:
            self.tests: list[str] = []

        def pytest_collection_finish(self, session: pytest.Session) -> None:
            self.tests = [i.nodeid for i in session.items if i.get_closest_marker("gpu")]

    collector, printed = Collector(), io.StringIO()
    arguments = ["--collect-only", "-q", "-p", "no:cacheprovider", str(ROOT / "tests")]
    os.chdir(ROOT)
    with contextlib.redirect_stdout(printed):
        status = pytest.main(arguments, plugins=[collector])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"the tests cannot be collected\n{printed.getvalue()}")
    return collector.tests


def gpus() -> tuple[list[str], str]:
    """Name and UUID of each GPU that CUDA_VISIBLE_DEVICES leaves, and the driver's version."""
    query = ["nvidia-smi", "--query-gpu=name,uuid,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=True)
    rows = [line.split(", ") for line in done.stdout.strip().splitlines()]
    found = [f"{name} {uuid}" for name, uuid, _ in rows]
    visible = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    if visible:
        found = [
            gpu
            for word in visible
            for number, gpu in enumerate(found)
            if word == str(number) or gpu.split()[-1].startswith(word)
        ]
    return found, rows[0][2]


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"].lower()
        if name in PACKAGES or name.startswith("cupy-cuda"):
            found["cupy" if "cupy" in name else name] = distribution.version
    code = "from mpi4py import MPI; print(MPI.Get_library_version())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    found["mpi"] = " ".join(done.stdout.split()[:3]).strip("\0,")
    return found


def verdict(run: dict) -> str:
    """Say in one line whether a run passed, what failed and which parts were cut off."""
    counts = collections.Counter(result["outcome"] for result in run["tests"].values())
    bad = [part for part, end in run["parts"].items() if end != "passed"]
    cut_off = [part for part in bad if CUT_OFF in run["parts"][part]]
    if run["ok"]:
        word = "passed"
    else:
        word = "CUT OFF" if bad and bad == cut_off and not counts["failed"] else "FAILED"
    said = [f"{part} {run['parts'][part]}" for part in bad]
    said += [f"{counts[outcome]} {outcome}" for outcome in sorted(counts)]
    return f"{run['configuration']}: {word} ({', '.join(said)})"


def read_part(file: Path) -> tuple[dict[str, dict], str]:
    """Return the outcomes of one part of the suite, and how it ended."""
    from tests.helpers.outcomes import read

    end = file.with_suffix(".end")
    said = end.read_text().strip() if end.exists() else "passed"
    if not file.exists():
        return {}, said if CUT_OFF in said else "no outcomes"
    tests = read(file)
    if CUT_OFF in said:
        for result in tests.values():
            if result["outcome"] == "unfinished":
                result["outcome"] = "cut-off"
    return tests, said


@contextlib.contextmanager
def alone(file: Path) -> Iterator[None]:
    """Keep other configurations from recording meanwhile: they may run beside this one."""
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def record(options: argparse.Namespace) -> bool:
    tests: dict[str, dict] = {}
    parts = {}
    for file in options.outcomes:
        of_part, parts[file.stem] = read_part(file)
        tests |= of_part
    names, driver = gpus()
    revision = git(ROOT, "rev-parse", "--verify", "HEAD")
    outcomes = {result["outcome"] for result in tests.values()}
    is_whole = set(parts.values()) == {"passed"}
    run = {
        "configuration": options.configuration,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "ok": is_whole and "passed" in outcomes and outcomes <= {"passed", "skipped"},
        "ranks": options.ranks,
        "mps": options.mps,
        "masks": options.masks,
        "parts": parts,
        "gpus": names,
        "driver": driver,
        "versions": versions(),
        "revision": revision.strip() if revision else None,
        "sources_sha256": sources_sha256(),
        "tests": tests,
    }
    with alone(options.file):
        evidence = load(options.file)
        add(evidence, run)
        unfinished = options.file.with_suffix(".new")
        unfinished.write_text(dumps(evidence))
        unfinished.replace(options.file)
    print(verdict(run))
    return run["ok"]


def check(file: Path) -> bool:
    tests = gpu_tests()
    errors, notes = problems(load(file), tests, sources_sha256())
    said = [f"ERROR: {error}" for error in errors]
    if len(said) > MOST_SAID:
        said[MOST_SAID:] = [f"ERROR: and {len(said) - MOST_SAID} more"]
    for text in [*notes, *said]:
        print(f"gpu evidence: {text}")
    print(f"gpu evidence: {len(tests)} GPU tests, {len(errors)} errors")
    return not errors


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.evidence", description=__doc__)
    parser.add_argument("--file", type=Path, default=FILE)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check")
    recorder = commands.add_parser("record")
    recorder.add_argument("--configuration", required=True)
    recorder.add_argument("--ranks", type=int, required=True)
    recorder.add_argument("--mps", action="store_true")
    recorder.add_argument("--masks", action="store_true")
    recorder.add_argument("outcomes", type=Path, nargs="+")
    options = parser.parse_args()
    ok = check(options.file) if options.command == "check" else record(options)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()

"""What was seen to pass on GPUs, kept in evidence.json, since no GPU is there when code changes.

python -m tests.gpu.evidence check
    Fails when a GPU test (marked `gpu`, as all in tests/gpu are) has not passed in a run of the
    file, or failed in one. Tests named under the file's "unproven" are accepted, and printed.
    Sources that have changed since a run are said, and are no failure.
python -m tests.gpu.evidence record --configuration NAME --ranks N [--mps] [--masks] OUTCOMES...
    Adds a run from files that `--outcomes` wrote, in place of the last such run.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("evidence.json")
MOST_SAID = 10
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
        files = {path for path in found if "__pycache__" not in path.parts}
    total = hashlib.sha256()
    for path in sorted(files):
        name = path.relative_to(root).as_posix()
        if path.is_file() and name != "tests/gpu/evidence.json":
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{name}\0{content}\n".encode())
    return total.hexdigest()


def load(file: Path = FILE) -> dict:
    return json.loads(file.read_text()) if file.exists() else {"unproven": [], "runs": []}


def dumps(evidence: dict) -> str:
    """As JSON with one line a test, so that the file can be read and compared."""
    text = json.dumps(evidence, indent=1)
    return (
        re.sub(r'\{\s+("outcome": "\w+"),\s+("seconds": [\d.e-]+)\s+\}', r"{\1, \2}", text) + "\n"
    )


def add(evidence: dict, run: dict) -> None:
    """Put `run` in the place of the last one of its configuration and number of GPUs."""

    def key(of: dict) -> tuple:
        return of["configuration"], len(of["gpus"])

    others = [other for other in evidence["runs"] if key(other) != key(run)]
    evidence["runs"] = sorted([*others, run], key=key)


def problems(evidence: dict, gpu_tests: list[str], sha256: str) -> tuple[list[str], list[str]]:
    """What makes `check` fail, and what it only says."""
    errors, notes = [], []
    unproven = set(evidence["unproven"])
    passed = set()
    for run in evidence["runs"]:
        where = f"{run['configuration']} of {run['date']}"
        outcomes = {test: result["outcome"] for test, result in run["tests"].items()}
        passed |= {test for test, outcome in outcomes.items() if outcome == "passed"}
        bad = {test for test, outcome in outcomes.items() if outcome not in ("passed", "skipped")}
        for test in sorted(bad):
            if test in unproven:
                notes.append(f"UNPROVEN, {outcomes[test]} in {where}: {test}")
            else:
                errors.append(f"{test}: {outcomes[test]} in {where}")
        if not run["ok"] and not bad:
            errors.append(f"{where} did not end well")
        if run["sources_sha256"] != sha256:
            notes.append(f"the sources have changed since {where}")
    for test in sorted(set(gpu_tests) - passed):
        if test in unproven:
            notes.append(f"UNPROVEN, passed on no GPU yet: {test}")
        else:
            errors.append(f"{test}: not seen to pass on a GPU; scripts/test-gpu adds a run")
    return errors, notes


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


def record(options: argparse.Namespace) -> bool:
    tests: dict[str, dict] = {}
    is_whole = True
    for file in options.outcomes:
        is_whole &= file.exists()
        tests |= json.loads(file.read_text()) if file.exists() else {}
    names, driver = gpus()
    revision = git(ROOT, "rev-parse", "--verify", "HEAD")
    outcomes = {result["outcome"] for result in tests.values()}
    run = {
        "configuration": options.configuration,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "ok": is_whole and "passed" in outcomes and outcomes <= {"passed", "skipped"},
        "ranks": options.ranks,
        "mps": options.mps,
        "masks": options.masks,
        "gpus": names,
        "driver": driver,
        "versions": versions(),
        "revision": revision.strip() if revision else None,
        "sources_sha256": sources_sha256(),
        "tests": tests,
    }
    evidence = load(options.file)
    add(evidence, run)
    unfinished = options.file.with_suffix(".new")
    unfinished.write_text(dumps(evidence))
    unfinished.replace(options.file)
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

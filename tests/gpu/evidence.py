"""What was seen to pass on GPUs: a file for each configuration in evidence/, since CI has no GPU.

python -m tests.gpu.evidence check
    Prints what each run proves. A run of other sources than today's proves nothing about these: it
    is printed as unproven, and is no failure. A run in which a test failed is one.
python -m tests.gpu.evidence record --configuration NAME --ranks N [--mps] [--masks] XML...
    Writes the run of these files of `pytest --junitxml`, in place of the last of its kind, and
    prints its verdict. Beside PART.xml, PART.end says how that part ended: "cut off after 180 s".
"""

import argparse
import collections
import hashlib
import importlib.metadata
import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scripts.lib.tally import read

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent / "evidence"
SOURCES = {".py", ".c", ".h", ".cu", ".cuh"}
PACKAGES = ("cupy", "cuda-bindings", "mpi4py", "numpy")
Run = dict[str, Any]


def git(root: Path, *arguments: str) -> str | None:
    """What git says, None where there is no git or no repository."""
    try:
        command = ["git", "-C", root, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def sources_sha256(root: Path = ROOT) -> str:
    """One hash over paths and contents of the sources of mpishare/ and tests/."""
    total = hashlib.sha256()
    found = [path for name in ("mpishare", "tests") for path in (root / name).rglob("*")]
    for path in sorted(path for path in found if path.suffix in SOURCES):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(root).as_posix()}\0{content}\n".encode())
    return total.hexdigest()


def load(folder: Path = FOLDER) -> list[Run]:
    """Every recorded run, in the order of their files."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


def title(run: Run) -> str:
    """The words that tell a run from the others."""
    return f"{run['configuration']} of {run['date'][:10]}, GPUs: {len(run['gpus'])}"


def state(run: Run, sha256: str) -> str:
    """What the run says about the sources of this hash."""
    if not run["ok"]:
        return "failed"
    return "proven" if run["sources_sha256"] == sha256 else "unproven: the sources have changed"


def verdict(run: Run) -> str:
    """Say in one line whether a run passed, what failed and which parts were cut off."""
    bad = {part: end for part, end in run["parts"].items() if end != "passed"}
    is_cut = bad and all("cut off" in end for end in bad.values()) and not run["failures"]
    word = "passed" if run["ok"] else "CUT OFF" if is_cut else "FAILED"
    said = [f"{part} {end}" for part, end in bad.items()]
    said += [f"{count} {outcome}" for outcome, count in run["counts"].items()]
    return f"{run['configuration']}: {word} ({', '.join(said)})"


def gpus() -> tuple[list[str], str]:
    """Name and UUID of each GPU that programs see here, and the driver's version.

    CUDA tells which: behind an MPS daemon CUDA_VISIBLE_DEVICES counts the GPUs of the daemon.
    """
    from mpishare.backends.driver import visible_uuids

    query = ["nvidia-smi", "--query-gpu=name,uuid,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=True)
    rows = [line.split(", ") for line in done.stdout.strip().splitlines()]
    names = {uuid: name for name, uuid, _ in rows}
    return [f"{names[uuid]} {uuid}" for uuid in visible_uuids()], rows[0][2]


def versions() -> dict[str, str]:
    """Those of what the tests ran with."""
    found = {"python": platform.python_version()}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"].lower()
        if name in PACKAGES or name.startswith("cupy-cuda"):
            found["cupy" if "cupy" in name else name] = distribution.version
    code = "from mpi4py import MPI; print(MPI.Get_library_version())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return found | {"mpi": " ".join(done.stdout.split()[:3]).strip("\0,")}


def record(options: argparse.Namespace) -> bool:
    """Write a run down; return whether all of it passed."""
    parts, failures, passed = {}, [], 0
    skips = collections.Counter[str]()
    for file in options.files:
        end = file.with_suffix(".end")
        parts[file.stem] = end.read_text().strip() if end.exists() else "passed"
        if file.exists():
            good, bad, reasons = read(file)
            passed, failures = passed + good, failures + bad
            skips.update(reasons)
        elif parts[file.stem] == "passed":
            parts[file.stem] = "no outcomes"
    found, driver = gpus()
    revision = git(ROOT, "rev-parse", "--verify", "HEAD")
    run = {
        "configuration": options.configuration,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "ok": passed > 0 and not failures and set(parts.values()) == {"passed"},
        "ranks": options.ranks,
        "mps": options.mps,
        "masks": options.masks,
        "parts": parts,
        "gpus": found,
        "driver": driver,
        "versions": versions(),
        "revision": revision.strip() if revision else None,
        "sources_sha256": sources_sha256(),
        "counts": {"passed": passed, "failed": len(failures), "skipped": skips.total()},
        "failures": failures,
        "skips": dict(skips.most_common()),
    }
    file = options.folder / f"{options.configuration}-on-{len(found)}.json"
    file.write_text(json.dumps(run, indent=1) + "\n")
    print(verdict(run))
    return run["ok"]


def check(folder: Path) -> bool:
    """Print the state of each run; return whether none failed."""
    runs, sha256 = load(folder), sources_sha256()
    for run in runs:
        lines = [f"{title(run)}: {state(run, sha256)}", *run["failures"]]
        print(*lines, sep="\n  ")
    return all(run["ok"] for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.evidence", description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check")
    recorder = commands.add_parser("record")
    recorder.add_argument("--configuration", required=True)
    recorder.add_argument("--ranks", type=int, required=True)
    recorder.add_argument("--mps", action="store_true")
    recorder.add_argument("--masks", action="store_true")
    recorder.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    is_good = check(options.folder) if options.command == "check" else record(options)
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()

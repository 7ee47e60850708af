"""Add up what the steps of scripts/test left in a folder, and end with "N passed, N failed"."""

import sys
from pathlib import Path

from tests.helpers.outcomes import read


def tally(folder: Path) -> tuple[list[str], int, int]:
    """Lines about what is wrong or was skipped, and how many tests and checks passed and failed."""
    lines, passed, failed = [], 0, 0
    for step in (folder / "steps").read_text().splitlines():
        kind, name, status = step.split("\t")
        if kind == "check":
            bad = [name] if status != "0" else []
            good, skipped = 1 - len(bad), 0
        else:
            file = folder / f"{name}.jsonl"
            tests = read(file) if file.exists() else {}
            by_outcome = {test: result["outcome"] for test, result in tests.items()}
            good = sum(outcome == "passed" for outcome in by_outcome.values())
            skipped = sum(outcome == "skipped" for outcome in by_outcome.values())
            bad = [
                f"{name}: {test} {outcome}"
                for test, outcome in by_outcome.items()
                if outcome not in ("passed", "skipped")
            ]
            if not bad and status != "0":
                bad = [f"{name}: exit status {status}"]
            if not bad and not good:
                bad = [f"{name}: ran no test"]
        lines += [f"failed: {text}" for text in bad]
        if skipped:
            lines.append(f"{name}: {skipped} skipped")
        passed, failed = passed + good, failed + len(bad)
    if not passed + failed:
        lines, failed = ["failed: no step of this name"], 1
    return lines, passed, failed


if __name__ == "__main__":
    notes, n_passed, n_failed = tally(Path(sys.argv[1]))
    print("", *notes, f"{n_passed} passed, {n_failed} failed", sep="\n")
    sys.exit(n_failed > 0)

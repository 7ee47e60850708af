"""Add up what the steps of scripts/test left, and end with "N passed, N failed, N skipped"."""

import collections
import sys
from pathlib import Path

from tests.helpers.outcomes import read


def tally(folder: Path) -> tuple[list[str], bool]:
    """Lines that name each failure, each reason for skips, and the counts; whether any failed.

    The file `steps` has a line per step: its kind, its name, and how it ended. A "check" counts as
    one test, as a step that was left out does ("skip", with the reason); of "tests" each counts.
    """
    failures, reasons, passed = [], collections.Counter[str](), 0
    for step in (folder / "steps").read_text().splitlines():
        kind, name, end = step.split("\t")
        if kind == "skip":
            reasons[f"the step {name}: {end}"] += 1
            continue
        if kind == "check":
            bad = [name] if end != "0" else []
            passed += end == "0"
        else:
            file = folder / f"{name}.jsonl"
            tests = read(file) if file.exists() else {}
            good = sum(result["outcome"] == "passed" for result in tests.values())
            skipped = [each["reason"] for each in tests.values() if each["outcome"] == "skipped"]
            bad = [
                f"{name}: {test} {result['outcome']}"
                for test, result in tests.items()
                if result["outcome"] not in ("passed", "skipped")
            ]
            if not bad and end != "0":
                bad = [f"{name}: exit status {end}"]
            if not bad and not tests:
                bad = [f"{name}: ran no test"]
            passed += good
            reasons.update(skipped)
        failures += bad
    if not passed and not failures and not reasons:
        failures = ["no step of this name"]
    lines = [f"failed: {text}" for text in failures]
    lines += [f"skipped {count}: {reason}" for reason, count in reasons.most_common()]
    lines.append(f"{passed} passed, {len(failures)} failed, {reasons.total()} skipped")
    return lines, bool(failures)


if __name__ == "__main__":
    said, has_failed = tally(Path(sys.argv[1]))
    print("", *said, sep="\n")
    sys.exit(has_failed)

"""Add up what the steps of scripts/test left, and end with "N passed, N failed, N skipped"."""

import collections
import sys
from pathlib import Path
from xml.etree import ElementTree


def read(file: Path) -> tuple[int, list[str], list[str]]:
    """Return how many tests passed, the names of those that failed, and the reasons of skips.

    From a file of `pytest --junitxml`, where a module that cannot be imported is a skipped test.
    """
    passed, failed, reasons = 0, [], []
    for case in ElementTree.parse(file).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif (skipped := case.find("skipped")) is not None:
            words = skipped.get("message", "")
            if words == "collection skipped":  # its text is that of a tuple
                words = (skipped.text or "").partition("Skipped: ")[2].rstrip("')\"")
            reasons.append(" ".join(words.split()))
        else:
            passed += 1
    return passed, failed, reasons


def tally(folder: Path) -> tuple[list[str], bool]:
    """Lines that name each failure, each reason for skips, and the counts; whether any failed.

    The file `steps` has a line per step: its kind, its name, and how it ended. A "check" counts as
    one test, as a step that was left out does ("skip", with the reason); of "tests" each counts, by
    the file NAME.xml. A process that dies writes none, and its step has failed.
    """
    failures, reasons, passed = [], collections.Counter[str](), 0
    for step in (folder / "steps").read_text().splitlines():
        kind, name, end = step.split("\t")
        good, bad, skipped = 0, [], []
        if kind == "skip":
            skipped = [f"the step {name}: {end}"]
        elif kind == "check":
            good = int(end == "0")
        elif (file := folder / f"{name}.xml").exists():
            good, bad, skipped = read(file)
        if not bad and kind != "skip" and (end != "0" or not (good or skipped)):
            bad = [f"exit status {end}, {good} passed"]
        passed += good
        failures += [f"{name}: {each}" for each in bad]
        reasons.update(skipped)
    lines = [f"failed: {text}" for text in failures]
    lines += [f"skipped {count}: {reason}" for reason, count in reasons.most_common()]
    lines.append(f"{passed} passed, {len(failures)} failed, {reasons.total()} skipped")
    return lines, bool(failures) or not (passed or reasons)


if __name__ == "__main__":
    said, has_failed = tally(Path(sys.argv[1]))
    print("", *said, sep="\n")
    sys.exit(has_failed)

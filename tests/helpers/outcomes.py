"""A pytest plugin: `--outcomes FILE` gets a line of JSON when a test begins and when it ends.

`read` makes {test: {outcome, seconds}} of it, and of a skipped test {..., reason}; a module that is
skipped when it is collected counts as a test. A test that has begun is "unfinished" until it ends,
so that a job that dies names its killer; lines are only added, since there are thousands.
SIGTERM, which `timeout` sends, ends pytest as Ctrl-C does: the ranks that the running test started
are killed, and what has failed so far is printed. Under mpirun it ends the process at once, since
the other ranks may never come to the end of the test.
"""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.helpers.launch import OF_A_JOB

# Set by the lockstep plugin on every rank but the first.
is_silent = pytest.StashKey[bool]()
WORST_FIRST = ("failed", "skipped", "passed")


class Outcomes:
    def __init__(self, config: pytest.Config, file: Path) -> None:
        self.config, self.file = config, file
        self.seconds, self.seen, self.reason = 0.0, set[str](), ""

    def pytest_sessionstart(self) -> None:
        if not self.config.stash.get(is_silent, False):
            self.file.write_text("")

    def write(self, test: str, outcome: str) -> None:
        if self.config.stash.get(is_silent, False):
            return
        line = {"test": test, "outcome": outcome, "seconds": round(self.seconds, 3)}
        if outcome == "skipped":
            line["reason"] = self.reason
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.reason = reason(report)
            self.write(report.nodeid, "skipped")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.seconds, self.seen = 0.0, set()
        self.write(nodeid, "unfinished")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds += report.duration
        self.seen.add(report.outcome)
        if report.skipped:
            self.reason = reason(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        worst = (outcome for outcome in WORST_FIRST if outcome in self.seen)
        self.write(nodeid, next(worst, "failed"))


def reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test was skipped, or is expected to fail."""
    if hasattr(report, "wasxfail"):
        return f"expected to fail: {report.wasxfail}"
    _, _, text = report.longrepr
    return " ".join(text.removeprefix("Skipped: ").split())


def read(file: Path) -> dict[str, dict]:
    """Return {test: {outcome, seconds, reason}} of a file that `--outcomes` wrote."""
    tests = {}
    for line in file.read_text().splitlines():
        result = json.loads(line)
        tests[result.pop("test")] = result
    return tests


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="write every test's outcome to this file")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--outcomes")
    if file is not None:
        config.pluginmanager.register(Outcomes(config, file.absolute()))
        if not any(name.startswith(OF_A_JOB) for name in os.environ):
            signal.signal(signal.SIGTERM, signal.default_int_handler)

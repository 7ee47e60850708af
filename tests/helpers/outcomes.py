"""A pytest plugin: `--outcomes FILE` holds {test: {outcome, seconds}} as JSON, after each test.

A test that has begun is "unfinished" until it ends, so that a job that dies names its killer.
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
        self.tests: dict[str, dict[str, str | float]] = {}

    def write(self) -> None:
        if self.config.stash.get(is_silent, False):
            return
        unfinished = self.file.with_suffix(".new")
        unfinished.write_text(json.dumps(self.tests, indent=1))
        unfinished.replace(self.file)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.tests[nodeid] = {"outcome": "unfinished", "seconds": 0.0}
        self.write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.tests[report.nodeid]
        test["seconds"] = round(float(test["seconds"]) + report.duration, 3)
        seen = [report.outcome, *([test["so_far"]] if "so_far" in test else [])]
        test["so_far"] = next(outcome for outcome in WORST_FIRST if outcome in seen)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        test = self.tests[nodeid]
        test["outcome"] = test.pop("so_far", "failed")
        self.write()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="write every test's outcome to this file")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--outcomes")
    if file is not None:
        config.pluginmanager.register(Outcomes(config, file.absolute()))
        if not any(name.startswith(OF_A_JOB) for name in os.environ):
            signal.signal(signal.SIGTERM, signal.default_int_handler)

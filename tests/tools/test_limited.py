"""Parts of the GPU suite that are cut off, or whose kernels the sanitizer accuses, say so."""

import os
import re
import subprocess
import sys

import pytest

from scripts.lib.tally import read
from tests.helpers.launch import ROOT

SOURCE = """
import subprocess, sys, time
def test_first(): pass
def test_second(): {second}
def test_third(): pass
"""
LIBRARIES = f"set -euo pipefail; source {ROOT}/scripts/lib/limited.sh; "
LIBRARIES += f"source {ROOT}/scripts/lib/sanitizer.sh; "


def bash(script, *words, **variables):
    command = ["bash", "-c", LIBRARIES + script, "bash", *map(str, words)]
    env = {**os.environ, **variables}
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=50
    )


@pytest.mark.parametrize(
    ("second", "options", "seconds", "status", "end", "counts"),
    [
        ("pass", [], 30, 0, "passed", (3, 0)),
        ("pass", ["-k", "no_such_name"], 30, 0, "passed", (0, 0)),
        # pytest counts the one that is cut as passed, its part says that it was not.
        ("time.sleep(40)", [], 8, 124, r"cut off after \d+ s", (2, 0)),
        ("assert False", [], 30, 1, r"failed .* s, exit status 1", (2, 1)),
        # The exit status of a limit, before the limit.
        ("import os; os._exit(124)", [], 30, 124, r"failed after .*", (0, 0)),
    ],
)
def test_how_a_part_ends(tmp_path, second, options, seconds, status, end, counts):
    (tmp_path / "test_it.py").write_text(SOURCE.format(second=second))
    own = ["-c", ROOT / "pyproject.toml", "-p", "tests.conftest", *options]
    pytest_on_it = [sys.executable, "-m", "pytest", *own, tmp_path / "test_it.py"]
    done = bash('limited "$@"', seconds, "waits", tmp_path, *pytest_on_it)
    assert done.returncode == status, done.stdout + done.stderr
    words = (tmp_path / "waits.end").read_text().strip()
    assert re.fullmatch(end, words)
    file = tmp_path / "waits.xml"
    passed, failed, _ = read(file) if file.exists() else (0, [], [])
    assert (passed, len(failed)) == counts
    if "cut off" in end:
        assert f"== waits: {words}" in done.stdout
        # It ended by itself, and told where it was, which may be in pytest.
        assert "KeyboardInterrupt" in done.stdout + done.stderr


# Stands for the tool, which needs a GPU: writes a log per process, and runs its command.
TOOL = """#!/usr/bin/env bash
said=$TRIAL
while [[ $1 == --* ]]; do
  [[ $1 != --log-file ]] || log=${2//%p/$$}
  [[ $1 != --tool ]] || said=$SAID
  shift 2
done
echo "========= ERROR SUMMARY: $said errors" >"$log"
"$@" && exit "$((99 * said))"
"""
TWICE = '"$@" & first=$!; "$@" & second=$!; wait "$first"; wait "$second"'
UNDER_IT = """
find_sanitizer true .
[[ -z $no_sanitizer ]] || { echo "$no_sanitizer"; exit; }
sanitized 20 memcheck 2 . bash -ec "$TWICE" ranks -- "$@" || echo "status $?"
cat memcheck.end
"""


@pytest.mark.parametrize(
    ("trial", "said", "command", "words"),
    [
        ("0", "0", "true", ["2 of 2 ranks without an error", "passed"]),
        ("0", "1", "true", ["0 of 2 ranks without an error", "exit status 99", "status 1"]),
        ("0", "0", "false", ["failed after", "status 1"]),
        ("1", "0", "true", ["compute-sanitizer does not run here"]),
    ],
    ids=["clean", "an error of the tool", "an error of the tests", "no tool"],
)
def test_how_a_part_under_the_sanitizer_ends(tmp_path, trial, said, command, words):
    (tmp_path / "compute-sanitizer").write_text(TOOL)
    (tmp_path / "compute-sanitizer").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    told = bash(
        f"cd {tmp_path}; {UNDER_IT}", command, TWICE=TWICE, TRIAL=trial, SAID=said, PATH=path
    ).stdout
    assert [each for each in words if each not in told] == [], told
    assert ("status" in told) == any("status" in each for each in words)

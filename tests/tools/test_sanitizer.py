"""A configuration of the GPU suite under compute-sanitizer fails where the tool finds an error."""

import os
import subprocess

import pytest

from tests.helpers.launch import ROOT

# Stands for the tool, which needs a GPU: writes a log per process, and runs its command.
TOOL = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do
  case $1 in
    --log-file) log=${2//%p/$$} && shift 2 ;;
    *) shift 2 ;;
  esac
done
[[ -z $SAID ]] || echo "========= $SAID" >"$log"
"$@" || exit
[[ $SAID != *"SUMMARY: 1 "* ]] || exit 99
"""
RANKS = 'for _ in 1 2; do "$@" & jobs+=($!); done; for job in "${jobs[@]}"; do wait "$job"; done'
SCRIPT = """set -euo pipefail
source "$ROOT/scripts/lib/limited.sh"
source "$ROOT/scripts/lib/sanitizer.sh"
find_sanitizer true "$FOLDER"
[[ -z $no_sanitizer ]] || { echo "$no_sanitizer"; exit; }
sanitized 20 memcheck 2 "$FOLDER" bash -ec "$RANKS" ranks -- "$@" || echo "status $?"
cat "$FOLDER/memcheck.end"
"""


@pytest.fixture
def sanitized(tmp_path):
    """Run a command on two ranks under a tool that writes these words; return what is said."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL)
    tool.chmod(0o755)

    def run(said, *command):
        env = {**os.environ, "ROOT": str(ROOT), "FOLDER": str(tmp_path), "RANKS": RANKS}
        env |= {"SAID": said, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        command = ["bash", "-c", SCRIPT, "bash", *(command or ["true"])]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return done.stdout

    return run


CLEAN, FOUND = "ERROR SUMMARY: 0 errors", "========= ERROR SUMMARY: 1 errors"
FAILS = ("bash", "-c", "[[ $1 == --junitxml ]] && exit 1")


@pytest.mark.parametrize(
    ("said", "command", "is_late", "words"),
    [
        (CLEAN, (), False, ["2 of 2 ranks without an error", "\npassed\n"]),
        ("RACECHECK SUMMARY: 0 hazards displayed (0 errors)", (), False, ["2 of 2", "\npassed\n"]),
        (CLEAN, (), True, ["0 of 2 ranks without an error", FOUND, "exit status 99", "status 1"]),
        (CLEAN, FAILS, False, ["status 1", "failed after"]),
        ("", (), False, ["compute-sanitizer does not run here"]),
    ],
    ids=["clean", "no races", "an error of the tool", "an error of the tests", "no tool"],
)
def test_how_it_ends(sanitized, tmp_path, said, command, is_late, words):
    if is_late:  # the trial is clean, the tests are not
        once = '[[ $1 != --tool ]] || SAID="ERROR SUMMARY: 1 errors"\nwhile'
        (tmp_path / "compute-sanitizer").write_text(TOOL.replace("while", once, 1))
    told = sanitized(said, *command)
    assert [each for each in words if each not in told] == [], told
    assert ("status" in told) == any("status" in each for each in words)

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


@pytest.mark.parametrize(
    "said", ["ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors)"]
)
def test_ranks_without_an_error_pass(sanitized, said):
    told = sanitized(said)
    assert "memcheck: 2 of 2 ranks without an error" in told
    assert "status" not in told
    assert told.endswith("\npassed\n")


def test_an_error_that_the_tool_finds_fails(sanitized, tmp_path):
    # The trial is clean, the tests are not.
    once = '[[ $1 != --tool ]] || SAID="ERROR SUMMARY: 1 errors"\nwhile'
    (tmp_path / "compute-sanitizer").write_text(TOOL.replace("while", once, 1))
    told = sanitized("ERROR SUMMARY: 0 errors")
    assert "0 of 2 ranks without an error" in told
    assert "========= ERROR SUMMARY: 1 errors" in told
    assert "exit status 99" in told


def test_tests_that_fail_without_an_error_of_the_tool_fail(sanitized):
    told = sanitized("ERROR SUMMARY: 0 errors", "bash", "-c", "[[ $1 == --outcomes ]] && exit 1")
    assert "status 1" in told
    assert "failed after" in told


def test_a_tool_that_cannot_attach_is_named(sanitized):
    assert sanitized("").startswith("compute-sanitizer does not run here")

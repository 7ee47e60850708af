"""Programs that call an application more than once, also with something in it that is broken."""

import json

from tests.helpers.launch import ROOT, Result, run_ranks, run_right

APPLICATIONS = ROOT / "scripts" / "applications"
HOST = {"MPISHARE_BACKEND": "host"}


def beginning(name: str, *others: str) -> str:
    """The beginning of a program: what it imports, and `run(*words)`."""
    return f"""
import sys
sys.path.insert(0, {str(APPLICATIONS)!r})
import {", ".join((name, *others))}, mpishare
from tests.helpers.reporting import report

def run(*words):
    return {name}.main(["--check", "--json", *words])
"""


def rows_of(result: Result) -> list[dict]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def right_rows(name: str, ranks: int, backend: str, program: str, words: list[str]) -> list[dict]:
    """What a program printed with `--json`, all of it checked."""
    limit_s = 58 if backend == "host" else 180  # ranks may take turns on a GPU
    env = {"MPISHARE_BACKEND": backend}
    rows = rows_of(run_right(ranks, program, words, timeout_s=limit_s, env=env))
    for row in rows:
        assert (row["program"], row["backend"], row["ranks"]) == (name, backend, ranks)
        assert row["checked"] is True
    return rows


def require_seen(program: str, *broken: str) -> Result:
    """Each broken part ends the application with status 1, and without one it is right."""
    result = run_ranks(2, program, env=HOST)
    for told in result.reports.values():
        assert told == {**dict.fromkeys(broken, 1), "whole": 0}, result.describe()
    return result

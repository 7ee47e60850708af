"""Programs that call an application more than once, also with something in it that is broken."""

import json

from tests.helpers.launch import ROOT, Result, run_ranks

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


def require_seen(program: str, *broken: str) -> Result:
    """Each broken part ends the application with status 1, and without one it is right."""
    result = run_ranks(2, program, timeout_s=58, env=HOST)
    for told in result.reports.values():
        assert told == {**dict.fromkeys(broken, 1), "whole": 0}, result.describe()
    return result

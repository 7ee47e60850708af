"""Trials of a library in a child process, which may crash or hang: see `trial`, the program."""

from __future__ import annotations

from pathlib import Path

from mpishare.setup.in_child import run_in_child

_TRIAL = Path(__file__).with_name("trial.py")


def run_trial(program: str, *arguments: object) -> str | None:
    """Return why a program of `trial` failed in a child, None where it did not.

    Local, host-blocking: some seconds. The arguments are those of the program.
    """
    return run_in_child(_TRIAL, program, *arguments)

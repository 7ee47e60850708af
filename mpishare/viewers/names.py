"""Names of windows on this machine: which are allowed, which are there, and of which job."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from mpishare.errors import HandleError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,40}")
_MAX_JOB = 36
"""With the longest name and what the door adds, an address of 107 bytes: sockaddr_un."""

_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "FLUX_JOB_ID")
_LISTED = re.compile(r" 00010000 .* @mpishare/(\d+)/window/([^/\s]+)/([^/\s]+)$", re.MULTILINE)
"""A line of /proc/net/unix: a socket that listens, its abstract address behind an @."""


class Listed(NamedTuple):
    """A named window of some process of this machine."""

    uid: int
    job: str
    name: str


def check_name(call: str, name: Any) -> str | None:
    """Return the name of a window, or raise what the user must change. Local."""
    if name is None:
        return None
    if not isinstance(name, str):
        raise TypeError(f"{call} failed: name must be a str, not {name!r}")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{call} failed: {name!r} is not a name: 1 to 40 letters, digits, '.', '_' or '-'"
        )
    return name


def job_id(leader_pid: int) -> str:
    """Return what tells this job from others: the scheduler's number, else the leader's pid."""
    found = (os.environ[name] for name in _JOB_VARIABLES if os.environ.get(name))
    return job_text(next(found, leader_pid))


def job_text(job: Any) -> str:
    """Return a job as it stands in an address: a scheduler's id may hold any characters."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", str(job))[:_MAX_JOB]


def door_name(job: str, name: str) -> str:
    """Return the door's name of a window."""
    return f"window/{job}/{name}"


def listed() -> list[Listed]:
    """Return the named windows of this machine, of all users, in order. Local.

    Those of this network namespace: abstract sockets of others are not seen.
    """
    text = Path("/proc/net/unix").read_text(errors="replace")
    found = {Listed(int(uid), job, name) for uid, job, name in _LISTED.findall(text)}
    return sorted(found)


def my_windows() -> list[Listed]:
    """Return those of this user."""
    return [each for each in listed() if each.uid == os.getuid()]


def find(name: str, job: str | None) -> Listed:
    """Return this user's window of that name, of that job or of the only one that has it. Local.

    Raises
    ------
    HandleError
        If there is none, or if several jobs have one.
    """
    there = listed()
    mine = [each for each in there if each.uid == os.getuid()]
    found = [each for each in mine if each.name == name and job in (None, each.job)]
    if len(found) == 1:
        return found[0]
    call = f"attach({name!r})" if job is None else f"attach({name!r}, job={job!r})"
    if found:
        jobs = ", ".join(repr(each.job) for each in found)
        raise HandleError(
            f"{call} failed: jobs {jobs} have a window of that name. Pass job= with one of them."
        )
    windows = ", ".join(f"{each.name!r} of job {each.job}" for each in mine) or "none"
    owners = [each.uid for each in there if each.name == name and each.uid != os.getuid()]
    other = (
        f" User {owners[0]} has a window of that name; windows are for processes of one user."
        if owners
        else ""
    )
    raise HandleError(
        f"{call} failed: no process of this user has a window of that name on this machine, or it "
        "is in another network namespace (a container with a network of its own), where it cannot "
        f"be seen.{other} Windows that are there: {windows}."
    )

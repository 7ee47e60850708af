"""Names of windows on this machine: their syntax, how one is found, and the list of all."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpishare.coordination.poll import poll
from mpishare.errors import HandleError, MpiShareError, PeerTimeout, describe
from mpishare.memory.fd_client import FdClient
from mpishare.view.page import Description

if TYPE_CHECKING:
    from collections.abc import Iterable

# Keeps an address within the 107 bytes of sockaddr_un, with the longest name and the door's suffix.
_MAX_JOB = 31
# A wait for a window reads the list of sockets, which costs the kernel some 0.1 ms and the job
# nothing; no event announces an abstract socket.
_PAUSE_S = 0.02
_ANSWER_S = 2.0
_CONNECT_S = 0.5  # in all, for those that take no connection: other users can bind any name

_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "FLUX_JOB_ID")
# A line of /proc/net/unix: a socket that listens, its abstract address behind an @. Any user may
# have bound it.
_LISTED = re.compile(
    r" 00010000 .* @(mpishare/(\d+)/window/([A-Za-z0-9._-]+)/([A-Za-z0-9._-]+)/[A-Za-z0-9_-]+)$",
    re.MULTILINE,
)


class Listed(NamedTuple):
    """An address that a named window of some process of this machine may have."""

    uid: int
    job: str
    name: str
    address: str

    def __str__(self) -> str:
        """Return the name of the window in errors."""
        return f"{self.name!r} of job {self.job}"


def job_id(leader_pid: int) -> str:
    """Return the identity of this job: the scheduler's number, else the leader's pid."""
    found = (os.environ[name] for name in _JOB_VARIABLES if os.environ.get(name))
    return job_text(next(found, leader_pid))


def job_text(job: Any) -> str:
    """Return a job as it stands in an address: a scheduler's id may hold any characters."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", str(job))[:_MAX_JOB]


def door_name(job: str, name: str) -> str:
    return f"window/{job}/{name}"


def listed(name: str | None = None, job: str | None = None) -> list[Listed]:
    """Return the windows in /proc/net/unix, of all users, in order: those of a name, of a job.

    Only those of this network namespace: abstract sockets of others are not visible.
    """
    text = Path("/proc/net/unix").read_text(errors="replace")
    found = {Listed(int(uid), job, name, full) for full, uid, job, name in _LISTED.findall(text)}
    return sorted(each for each in found if name in (None, each.name) and job in (None, each.job))


def visit_mine(windows: Iterable[Listed], answer_s: float) -> dict[Listed, FdClient]:
    """Connect to those windows that processes of this user have, for the caller to close."""
    visits: dict[Listed, FdClient] = {}
    left_s = _CONNECT_S
    for window in windows:
        if window.uid == os.getuid():
            begin = time.monotonic()
            with suppress(HandleError):  # another user's, or gone
                try:
                    visits[window] = FdClient(window.address, str(window), answer_s, left_s)
                except PeerTimeout:
                    left_s = max(left_s - (time.monotonic() - begin), 0.0)
    return visits


def find(
    name: str, job: str | None, timeout_s: float, wait_s: float = 0.0
) -> tuple[Listed, FdClient]:
    """Connect to this user's window of that name, of that job or of the only one that has it.

    Waits for it, at most `wait_s`. Raises `HandleError` if there is none, or at once if several
    jobs have one.
    """
    visits = dict[Listed, FdClient]()

    def is_there() -> bool:
        nonlocal visits
        visits = visit_mine(listed(name, job), timeout_s)
        return bool(visits)

    if not is_there() and wait_s:
        poll(is_there, wait_s, pause_s=_PAUSE_S)
    if len(visits) == 1:
        return visits.popitem()
    for visit in visits.values():
        visit.close()
    call = f"attach({name!r})" if job is None else f"attach({name!r}, job={job!r})"
    raise _why_not_one(call, name, visits)


def _why_not_one(call: str, name: str, mine: Iterable[Listed]) -> HandleError:
    """Return the error where this user has no window of that name, or several."""
    if jobs := ", ".join(repr(window.job) for window in mine):
        return HandleError(
            f"{call} failed: jobs {jobs} have a window of that name. Pass job= with one of them."
        )
    others = visit_mine(listed(), _ANSWER_S)
    for visit in others.values():
        visit.close()
    windows = ", ".join(map(str, others)) or "none"
    owners = [each.uid for each in listed(name) if each.uid != os.getuid()]
    other = (
        f" User {owners[0]} has a window of that name; windows are for processes of one user."
        if owners
        else ""
    )
    return HandleError(
        f"{call} failed: no process of this user has a window of that name on this machine, or it "
        "is in another network namespace (a container with a network of its own), where it cannot "
        f"be seen.{other} Windows that are there: {windows}."
    )


# --- the list of all windows


def attachable() -> list[dict[str, Any]]:
    """Return a description of each named window of this user on this machine. Host-blocking.

    Each has ``name`` and ``job``; then ``dtype``, ``shapes`` and ``ranks`` of the segments,
    ``backend``, ``pid`` of the leader and ``viewers``, or the ``error`` of one that does not
    answer.
    """
    found = []
    for window, visit in visit_mine(listed(), _ANSWER_S).items():
        try:
            with visit:
                facts = _facts(Description.ask(visit))
        except MpiShareError as error:
            facts = {"error": describe(error)}
        found.append({"name": window.name, "job": window.job} | facts)
    return found


def _facts(window: Description) -> dict[str, Any]:
    return {
        "dtype": str(window.dtype),
        "shapes": [list(segment.layout.shape) for segment in window.segments],
        "ranks": [segment.rank for segment in window.segments],
        "backend": window.backend,
        "pid": window.pid,
        "viewers": list(window.viewers),
    }


def as_text(windows: list[dict[str, Any]]) -> str:
    if not windows:
        return (
            "No window of this user can be attached to on this machine (and network namespace).\n"
        )
    return "".join(_line(window) for window in windows)


def _line(window: dict[str, Any]) -> str:
    begin = f"{window['name']}  job {window['job']}: "
    if "error" in window:
        return f"{begin}{window['error']}\n"
    shapes = ", ".join(
        f"{tuple(shape)} of rank {rank}"
        for rank, shape in zip(window["ranks"], window["shapes"], strict=True)
    )
    viewers = ", ".join(map(str, window["viewers"])) or "none"
    return (
        f"{begin}{window['dtype']}, {shapes}; backend {window['backend']}, leader's pid "
        f"{window['pid']}, viewers {viewers}\n"
    )

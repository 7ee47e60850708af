"""Names of windows on this machine: their syntax, and the list of those that exist."""

from __future__ import annotations

import logging
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpishare.errors import HandleError, PeerTimeout, late
from mpishare.memory.fd_client import FdClient

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

log = logging.getLogger("mpishare.window")

# Keeps an address within the 107 bytes of sockaddr_un, with the longest name and the door's suffix.
_MAX_JOB = 31
_TURN_S = 0.05
# A wait for a window reads the list of sockets, which costs the kernel some 0.1 ms and the job
# nothing; no event announces an abstract socket. The pause is a share of the time waited so far.
_PAUSE_SHARE, _MIN_PAUSE_S, _MAX_PAUSE_S = 1 / 16, 0.002, 0.25
_GRACE_S = 0.5

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


def listed() -> list[Listed]:
    """Return the windows in /proc/net/unix, of all users, in order.

    Only those of this network namespace: abstract sockets of others are not visible.
    """
    text = Path("/proc/net/unix").read_text(errors="replace")
    found = {Listed(int(uid), job, name, full) for full, uid, job, name in _LISTED.findall(text)}
    return sorted(found)


def visit_mine(
    windows: Iterable[Listed], answer_s: float, connect_s: float
) -> tuple[dict[Listed, FdClient], list[Listed]]:
    """Connect to those windows that processes of this user have. Host-blocking.

    Returns the visits, for the caller to close, and the windows that took no connection in time,
    whose users are unknown. `connect_s` is for all connections together. Once one is found, others
    that take no connections are given half a second more: they may be sockets of another user, who
    can give them any name. There may be too many to visit: after that time, or half a second, the
    rest count as full.
    """
    visits: dict[Listed, FdClient] = {}
    full = _mine(windows)
    begin, wait_s = time.monotonic(), 0.0
    end, last = begin + connect_s, begin + max(connect_s, _GRACE_S)
    while True:
        turn, full = full, []
        for number, window in enumerate(turn):
            if time.monotonic() > last:
                full += turn[number:]
                log.warning(
                    "%d of %d sockets that are named as windows of this user, such as %s, were not "
                    "asked in time: other users may have bound them",
                    len(turn) - number,
                    len(turn),
                    window,
                )
                break
            try:
                visits[window] = FdClient(window.address, str(window), answer_s, wait_s)
            except PeerTimeout:
                full.append(window)
            except HandleError:
                continue  # another user's, or gone
            wait_s = min(wait_s, max(end - time.monotonic(), 0.0))
        if visits:
            end = min(end, time.monotonic() + _GRACE_S)
        left_s = end - time.monotonic()
        if not full or left_s <= 0:
            return visits, full
        wait_s = left_s if len(full) == 1 else min(left_s, _TURN_S)


def _mine(windows: Iterable[Listed]) -> list[Listed]:
    return [window for window in windows if window.uid == os.getuid()]


def find(
    name: str, job: str | None, timeout_s: float, wait_s: float = 0.0
) -> tuple[Listed, FdClient]:
    """Connect to this user's window of that name, of that job or of the only one that has it.

    Waits for it, at most `wait_s`. Raises `HandleError` if there is none, or at once if several
    jobs have one, `PeerTimeout` if the only ones take no connections.
    """
    visits, full, tried = dict[Listed, FdClient](), list[Listed](), list[Listed]()
    for is_last in _looks(wait_s):
        named = _listed_as(name, job)
        # Sockets that were not this user's stay so: other users can neither hide nor hold a window.
        if is_last or full or named != tried:
            connect_s = timeout_s if is_last else min(timeout_s, _GRACE_S)
            visits, full = visit_mine(named, timeout_s, connect_s)
            tried = named
        if visits:
            break
    if len(visits) == 1:
        return visits.popitem()
    for visit in visits.values():
        visit.close()
    call = f"attach({name!r})" if job is None else f"attach({name!r}, job={job!r})"
    raise _why_not_one(call, name, visits, full, timeout_s)


def _looks(wait_s: float) -> Iterator[bool]:
    """Yield whenever it is time to look for a window: whether it is the last time."""
    begin = time.monotonic()
    while (waited_s := time.monotonic() - begin) < wait_s:
        yield False
        pause_s = min(max(_PAUSE_SHARE * waited_s, _MIN_PAUSE_S), _MAX_PAUSE_S)
        time.sleep(min(pause_s, wait_s - waited_s))
    yield True


def _listed_as(name: str, job: str | None) -> list[Listed]:
    return [window for window in listed() if window.name == name and job in (None, window.job)]


def _why_not_one(
    call: str, name: str, mine: Iterable[Listed], full: list[Listed], timeout_s: float
) -> HandleError | PeerTimeout:
    """Return the error where this user has no window of that name, or several."""
    if jobs := ", ".join(repr(window.job) for window in mine):
        return HandleError(
            f"{call} failed: jobs {jobs} have a window of that name. Pass job= with one of them."
        )
    if full:
        why = ": its process is stopped, or the window is another user's"
        return late(f"{call} failed: {full[0]} took no connection", timeout_s, why)
    there = listed()
    others = visit_mine(there, timeout_s, 0.0)[0]
    for visit in others.values():
        visit.close()
    windows = ", ".join(map(str, others)) or "none"
    owners = [each.uid for each in there if each.name == name and each.uid != os.getuid()]
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

"""A deadline for MPI's own start, which waits for ever where ranks cannot reach each other.

MPICH was seen to do so where the ranks of a machine have different /dev/shm (5.0.2). No Python runs
in a process that is inside ``MPI_Init``: a forked child speaks for it, and the C thread of
`faulthandler` ends it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mpishare.errors import format_nbytes
from mpishare.memory import shared
from mpishare.setup.surroundings import find_container, namespaces

if TYPE_CHECKING:
    from collections.abc import Iterator

WARN_AFTER_S = 10.0
"""After which it is said that MPI has not started, if the deadline is not sooner."""
_LEAD_S = 2.0  # of the last words before the end, as the first end of a rank ends the job

_ADVICE = (
    " MPICH waits for ever where the ranks of a machine have different /dev/shm: start their "
    "containers with --ipc=host; with MPIR_CVAR_NOLOCAL=1 each rank is a node of its own."
)


@contextlib.contextmanager
def limited_start(prog: str, deadline_s: float, *, is_first: bool) -> Iterator[None]:
    """Within, MPI may be started; the process ends with status 1 where that takes too long. Local.

    Parameters
    ----------
    prog : str
        Who speaks.
    deadline_s : float, s
        For the start.
    is_first : bool
        Whether this process gives the advice; each says where it is.
    """
    if "mpi4py.MPI" in sys.modules:
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    over, alive = os.pipe()
    child = os.fork()
    if not child:
        os.close(alive)
        _speak(prog, over, deadline_s, is_first=is_first)
        os._exit(0)
    os.close(over)
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115  faulthandler keeps it
    faulthandler.dump_traceback_later(deadline_s + _LEAD_S, exit=True, file=nowhere)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        nowhere.close()
        os.close(alive)  # the child ends
        os.waitpid(child, 0)


def _speak(prog: str, over: int, deadline_s: float, *, is_first: bool) -> None:
    """Say in the child that its parent still waits, unless the pipe says that this is over."""
    warn_s = min(WARN_AFTER_S, deadline_s)
    if select.select([over], [], [], warn_s)[0]:
        return
    text = f"{prog}: MPI has not started after {warn_s:g} s in {describe_process(os.getppid())}"
    _say(f"{text}.{_ADVICE if is_first else ''}\n")
    if deadline_s > warn_s and not select.select([over], [], [], deadline_s - warn_s)[0]:
        _say(f"{prog}: MPI has not started after {deadline_s:g} s: process {os.getppid()} ends\n")


def _say(text: str) -> None:
    os.write(2, text.encode())  # at once, so that lines of several ranks do not mix


def describe_process(pid: int) -> str:
    """Say in what surroundings a process of this PID namespace runs. Local."""
    words = [f"process {pid}"]
    container = find_container(os.environ)
    if container:
        words.append(f"in {container}")
    own = namespaces().get("pid")
    if own is not None:
        words.append(f"PID namespace {own}")
    with contextlib.suppress(OSError):
        room = os.statvfs(shared.FOLDER)
        device = Path(shared.FOLDER).stat().st_dev
        size = format_nbytes(room.f_blocks * room.f_frsize)
        words.append(f"{shared.FOLDER} of {size} (device {os.major(device)}:{os.minor(device)})")
    return ", ".join(words)

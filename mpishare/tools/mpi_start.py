"""MPI's own start in a program: its requirements, and a deadline.

MPICH (5.0.2) ends in ``MPI_Init`` where /dev/shm is read-only, by SIGBUS where that is too small,
and waits for ever where the ranks of a machine have different ones. No Python runs in a process
that is inside ``MPI_Init``: a child prints for it, and the C thread of `faulthandler` ends it. The
child runs a program of its own: beside threads, which NumPy starts, a fork alone is not safe.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mpishare.errors import UnsupportedError, format_nbytes
from mpishare.memory import shared
from mpishare.runtime.launch import number_in
from mpishare.runtime.surroundings import find_container, namespaces

if TYPE_CHECKING:
    from collections.abc import Iterator

# The time until a warning that MPI has not started, if the deadline is not sooner.
WARN_AFTER_S = 10.0
_LOCAL_RANKS = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_LEAD_S = 2.0  # of the last output before the end, as the first end of a rank ends the job
# MPICH's use of /dev/shm for each rank of a machine: measured 1036 KiB.
_OF_MPICH_NBYTES = 1100 << 10
_ADVICE = (
    " MPICH waits for ever where the ranks of a machine have different /dev/shm: start their "
    "containers with --ipc=host; with MPIR_CVAR_NOLOCAL=1 each rank is a node of its own."
)


@contextlib.contextmanager
def limited_start(prog: str, deadline_s: float, *, is_first: bool) -> Iterator[None]:
    """Let MPI start in the block; end the process with status 1 where it cannot, or not in time.

    Every process prints where it is; one that `is_first` adds the advice.
    """
    if "mpi4py.MPI" in sys.modules:
        yield
        return
    try:
        _require_shared_memory()
    except UnsupportedError as error:
        if _is_reported_by_first():
            time.sleep(_LEAD_S)
        else:
            os.write(2, f"{prog}: {error}\n".encode())  # at once: lines of ranks do not mix
        raise SystemExit(1) from None
    sys.stdout.flush()
    sys.stderr.flush()
    over, alive = os.pipe()
    what = json.dumps([over, _words(prog, deadline_s, is_first=is_first)])
    command = [sys.executable, "-IS", "-c", _SPEAKER, what]
    # In a group of its own: a launcher kills that of a process that died.
    child = subprocess.Popen(  # noqa: S603 - a fixed command
        command, pass_fds=[over], process_group=0
    )
    os.close(over)
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115  faulthandler keeps it
    faulthandler.dump_traceback_later(deadline_s + _LEAD_S, exit=True, file=nowhere)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        nowhere.close()
        with contextlib.suppress(BrokenPipeError):  # it has ended, behind its last output
            os.write(alive, b"0")  # the child ends
        os.close(alive)
        child.wait()


def _require_shared_memory() -> None:
    """Raise `UnsupportedError` where MPICH, and mpishare, would find no room in /dev/shm."""
    shared.create(1).close()
    count = number_in(os.environ, "MPI_LOCALNRANKS", 1)  # of MPICH's launcher
    left, total = shared.room()
    # The other ranks may have taken their part of the room already.
    if left < _OF_MPICH_NBYTES or total < count * _OF_MPICH_NBYTES:
        raise UnsupportedError(
            f"{shared.FOLDER} has {format_nbytes(left)} left of {format_nbytes(total)}, and MPICH "
            f"takes {format_nbytes(_OF_MPICH_NBYTES)} for each rank, {count} here. "
            f"{shared.MORE_ROOM}"
        )


def _is_reported_by_first() -> bool:
    """Whether the first rank of this machine has the same /dev/shm: that of the common launcher."""
    rank = next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "0")
    if rank == "0":
        return False
    try:
        of_parent = Path(f"/proc/{os.getppid()}/root{shared.FOLDER}").stat()
        return os.path.samestat(of_parent, Path(shared.FOLDER).stat())
    except OSError:  # another user's process, or one outside of this container
        return False


# Prints in the child that its parent waits, unless the pipe says that it has started or died.
_SPEAKER = """
import json, os, select, sys
over, waits = json.loads(sys.argv[1])
for seconds, late in waits:
    if select.select([over], [], [], seconds)[0]:
        break
    os.write(2, late.encode())
"""


def _words(prog: str, deadline_s: float, *, is_first: bool) -> list[tuple[float, str]]:
    """Return what to print after so many seconds, each from the last on."""
    warn_s, pid = min(WARN_AFTER_S, deadline_s), os.getpid()
    text = f"{prog}: MPI has not started after {warn_s:g} s in {describe_process(pid)}"
    waits = [(warn_s, f"{text}.{_ADVICE if is_first else ''}\n")]
    if deadline_s > warn_s:
        text = f"{prog}: MPI has not started after {deadline_s:g} s: process {pid} ends\n"
        waits.append((deadline_s - warn_s, text))
    return waits


def describe_process(pid: int) -> str:
    """Describe the surroundings of a process of this PID namespace."""
    words = [f"process {pid}"]
    container = find_container(os.environ)
    if container:
        words.append(f"in {container}")
    own = namespaces().get("pid")
    if own is not None:
        words.append(f"PID namespace {own}")
    with contextlib.suppress(OSError):
        device, size = Path(shared.FOLDER).stat().st_dev, format_nbytes(shared.room()[1])
        words.append(f"{shared.FOLDER} of {size} (device {os.major(device)}:{os.minor(device)})")
    return ", ".join(words)

"""CUDA-aware MPI: Irecv and Isend with pointers to memory of the GPU.

Whether an MPI takes such pointers must be tried: what `MPIX_Query_cuda_support` says is how it was
built, and an Open MPI without CUDA takes them where its UCX does. One that does not take them ends
with a segmentation fault, so that the trial is made by a child.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpishare.bench.links.link import Library
from mpishare.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mpishare.bench.links.link import Link
    from mpishare.bench.session import Session

#: What launchers tell a rank about its job. A child that does not hear it is a job of its own, of
#: one rank, with the same library and the same settings.
_OF_THE_JOB = (
    "HYDI_",
    "MPI_LOCAL",
    "OMPI_COMM_WORLD_",
    "OMPI_UNIVERSE_",
    "PMIX_",
    "PMI_",
    "PRTE_",
    "SLURM_",
)
_TRIAL = Path(__file__).with_name("trial.py")
#: A child starts MPI, CuPy and a GPU in some seconds.
_TRIAL_S = 60.0


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child that is no rank of this job. Local."""
    return {name: text for name, text in environment.items() if not name.startswith(_OF_THE_JOB)}


def trial(memory: str, device: int = 0) -> str | None:
    """Return why a child could not send such memory to itself by MPI, None where it could.

    Local, host-blocking: some seconds.

    Parameters
    ----------
    memory : str
        ``device``: that of a GPU. ``host``, and ``unreadable``, which no program can touch: what
        the trial itself is tried with.
    device : int
        The GPU's number in this process.
    """
    command = [sys.executable, str(_TRIAL), memory, str(device)]
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command
            command,
            env=child_environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TRIAL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_TRIAL_S:g} s"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"ended by {signal.Signals(-done.returncode).name}"
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit status {done.returncode}"


class CudaMpi(Library):
    """The MPI of the run, where it takes pointers to memory of the GPU."""

    label = "CUDA-aware MPI"
    halves = 2
    is_direct = True
    needs_own_gpu = False

    @classmethod
    def require(cls, session: Session) -> None:
        """Refuse to be made where this rank's MPI failed the trial.

        Local. One rank a node tries: what its child needs of memory and time the others would too.
        """
        node = session.node
        if not node.is_leader or node.device is None:
            return
        failure = trial("device", node.device.ordinal)
        if failure is not None:
            raise UnsupportedError(
                f"MPI: not CUDA-aware: a trial with device pointers failed: {failure}"
            )

    def empty(self, words: int) -> Any:
        """Return memory of the GPU. Local."""
        return self.session.node.xp.zeros(words, "u8")

    def mover(self, links: Sequence[Link], *, early: bool) -> Callable[[], None]:
        """Return Irecv, Isend and Waitall. Host-blocking: MPI knows no streams."""
        comm, synchronize = self.session.comm, self.session.synchronize
        waitall = MPI.Request.Waitall
        synchronize()  # what `empty` wrote is there before any message
        sends = [(_buffer(each.out), each.to, tag) for tag, each in enumerate(links)]
        receives = [(_buffer(each.into), each.source, tag) for tag, each in enumerate(links)]

        def move() -> None:
            if not early:
                synchronize()
            requests = [comm.Irecv(*words) for words in receives]
            if early:
                synchronize()
            requests += [comm.Isend(*words) for words in sends]
            waitall(requests)

        return move


def _buffer(array: Any) -> list[Any]:
    """Return what mpi4py takes for these words, found once: it asks an array at each call."""
    address = array.ctypes.data if hasattr(array, "ctypes") else array.data.ptr
    return [MPI.buffer.fromaddress(int(address), int(array.nbytes)), MPI.BYTE]

"""CUDA-aware MPI: Irecv and Isend with pointers to memory of the GPU.

Whether an MPI takes such pointers must be tried: `MPIX_Query_cuda_support` says how it was built,
and an Open MPI without CUDA takes them where its UCX does. One that does not ends with a
segmentation fault, so a child process tries it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpishare.bench.baselines.library import Library
from mpishare.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mpishare.bench.baselines.library import Transfer
    from mpishare.bench.session import Session

#: Where launchers describe the job to a rank. A child without these variables is a job of its own,
#: of one rank, with the same library and the same settings.
_OF_THE_JOB = ("HYDI_", "MPI_LOCAL", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PMI", "PRTE_", "SLURM_")
_TRIAL = Path(__file__).with_name("trial.py")
#: A child starts MPI, CuPy and a GPU in some seconds.
_TRIAL_S = 60.0


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child that is not a rank of this job."""
    return {name: text for name, text in environment.items() if not name.startswith(_OF_THE_JOB)}


def trial(memory: str, device: int = 0) -> str | None:
    """Return why a child could not send such memory to itself by MPI, None where it could.

    Local, host-blocking: some seconds. `memory` is ``device``, of the GPU with that ordinal;
    ``host`` and ``unreadable``, memory without access, are for tests of the trial.
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
        """Raise where the MPI of this rank failed the trial.

        Local. One rank per node tries it, which saves the others the memory and time of a child.
        """
        node = session.node
        if not node.is_leader or node.device is None:
            return
        failure = trial("device", node.device.ordinal)
        if failure is not None:
            raise UnsupportedError(
                f"MPI: not CUDA-aware: a trial with device pointers failed: {failure}"
            )

    def bind(self, transfers: Sequence[Transfer], *, early: bool) -> Callable[[], None]:
        """Return Irecv, Isend and Waitall. Host-blocking: MPI is not ordered on streams."""
        comm, synchronize = self.session.comm, self.session.synchronize
        waitall = MPI.Request.Waitall
        synchronize()  # what `empty` wrote is there before any message
        sends = [(_buffer(each.out), each.to, tag) for tag, each in enumerate(transfers)]
        receives = [(_buffer(each.into), each.source, tag) for tag, each in enumerate(transfers)]

        def move() -> None:
            if not early:
                synchronize()
            requests = [comm.Irecv(*each) for each in receives]
            if early:
                synchronize()
            requests += [comm.Isend(*each) for each in sends]
            waitall(requests)

        return move

    def bind_sum(self, array: Any) -> Callable[[], None]:
        """Return MPI_Allreduce in place. Host-blocking."""
        comm, synchronize = self.session.comm, self.session.synchronize
        kind = MPI.DOUBLE_COMPLEX if array.dtype.kind == "c" else MPI.DOUBLE
        buffer = [_buffer(array)[0], kind]

        def sum_() -> None:
            synchronize()
            comm.Allreduce(MPI.IN_PLACE, buffer)

        return sum_


def _buffer(array: Any) -> list[Any]:
    """Return the buffer that mpi4py takes, made once: it would inspect an array at each call."""
    address = array.ctypes.data if hasattr(array, "ctypes") else array.data.ptr
    return [MPI.buffer.fromaddress(int(address), int(array.nbytes)), MPI.BYTE]

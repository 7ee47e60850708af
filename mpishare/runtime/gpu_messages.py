"""Whether the MPI takes pointers to GPU memory, found out without a crash of the job.

MPI 4.1 has an info key for it (``mpi_memory_alloc_kinds``, MPI 4.1, 11.4.3), where the launcher was
asked for it. ``MPIX_Query_cuda_support`` only reports how a library was built: an Open MPI without
CUDA takes such pointers where its UCX does. An MPI that does not ends with a segmentation fault, so
a child process tries it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mpishare.runtime.outside import outside_environment

MPI_TRIAL = Path(__file__).with_name("mpi_trial.py")
TRIAL_S = 60.0  # a child starts MPI and a GPU in some seconds

_answers: dict[int, str | None] = {}


def why_not(ordinal: int, timeout_s: float = TRIAL_S) -> str | None:
    """Return why messages cannot begin and end in the memory of a GPU; None where they can.

    Host-blocking: some seconds for the first call of a process, unless the info key answers; at
    most `timeout_s`, while other ranks wait.
    """
    if ordinal not in _answers:
        _answers[ordinal] = _find_out(ordinal, min(timeout_s, TRIAL_S))
    return _answers[ordinal]


def _find_out(ordinal: int, timeout_s: float) -> str | None:
    from mpi4py import MPI

    if tells_cuda(MPI.COMM_WORLD.Get_info().get("mpi_memory_alloc_kinds")):
        return None
    failure = run_in_child(MPI_TRIAL, ordinal, timeout_s=timeout_s)
    return failure and f"a trial with pointers to GPU memory failed: {failure}"


def tells_cuda(kinds: str | None) -> bool:
    """Whether an MPI lists memory of GPUs among its kinds, as in
    ``"mpi,system,cuda:device:managed"``.

    Without restrictors a kind is all of its memory.
    """
    for kind in (kinds or "").split(","):
        name, *restrictors = kind.strip().split(":")
        if name == "cuda" and (not restrictors or "device" in restrictors):
            return True
    return False


def run_in_child(program: Path, *arguments: object, timeout_s: float = TRIAL_S) -> str | None:
    """Return why a Python program failed in a child, None where it did not.

    Host-blocking: some seconds, and `timeout_s` at most.
    """
    import signal  # both here: they take milliseconds, and on the host nothing is tried
    import subprocess

    # -P: modules beside the program have names of other packages.
    command = [sys.executable, "-P", str(program), *map(str, arguments)]
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command
            command,
            env=outside_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:g} s"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"ended by {signal.Signals(-done.returncode).name}"
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit status {done.returncode}"

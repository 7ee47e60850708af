"""Whether the MPI takes pointers to GPU memory, found out without a crash of the job.

MPI 4.1 has an info key for it (``mpi_memory_alloc_kinds``, MPI 4.1, 11.4.3), where the launcher was
asked for it. ``MPIX_Query_cuda_support`` only reports how a library was built: an Open MPI without
CUDA takes such pointers where its UCX does. An MPI that does not ends with a segmentation fault, so
a child process tries it.
"""

from __future__ import annotations

from pathlib import Path

from mpishare.runtime.in_child import TRIAL_S, run_in_child

MPI_TRIAL = Path(__file__).with_name("mpi_trial.py")


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
    failure = run_in_child(MPI_TRIAL, "device", ordinal, timeout_s=timeout_s)
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

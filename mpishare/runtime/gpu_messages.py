"""Whether the MPI takes pointers to GPU memory, as the MPI or the user says.

MPI 4.1 has an info key for it (``mpi_memory_alloc_kinds``, MPI 4.1, 11.4.3), where the launcher was
asked for it. How a library was built (``MPIX_Query_cuda_support``) tells less: an Open MPI without
CUDA takes such pointers where its UCX does. An MPI that does not ends with a segmentation fault, so
that host memory is used where neither says yes.
"""

from __future__ import annotations

import os

GPU_AWARE = "MPISHARE_GPU_AWARE_MPI"


def why_not() -> str | None:
    """Return why messages cannot begin and end in the memory of a GPU; None where they can."""
    from mpi4py import MPI

    said = os.environ.get(GPU_AWARE, "")
    if said not in ("", "0", "1"):
        raise ValueError(f"{GPU_AWARE}={said!r} is neither '0' nor '1'")
    if said:
        return None if said == "1" else f"{GPU_AWARE}=0"
    if tells_cuda(MPI.COMM_WORLD.Get_info().get("mpi_memory_alloc_kinds")):
        return None
    return f"the MPI does not say that it takes pointers to GPU memory, nor does {GPU_AWARE}=1"


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

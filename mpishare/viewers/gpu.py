"""The GPUs of a job as a process outside it sees them."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

from mpishare.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.backends.cuda import CudaBackend


def open_gpu(uuids: Sequence[str]) -> CudaBackend:
    """Return the backend of this process on the first of these GPUs, which becomes current. Local.

    Raises
    ------
    UnsupportedError
        If this process does not see all of them, or has not the packages to use them.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise UnsupportedError("there is no NVIDIA driver") from None
    if library.cuInit(0):
        raise UnsupportedError("no GPU is visible")
    try:
        from mpishare.backends.cuda import CudaBackend
        from mpishare.backends.driver import visible_uuids
    except ImportError as error:
        raise UnsupportedError(f"CuPy or cuda-bindings cannot be loaded: {error}") from None
    names = visible_uuids()
    hidden = sorted({uuid for uuid in uuids if uuid not in names})
    if hidden:
        raise UnsupportedError(f"{', '.join(uuid[:12] for uuid in hidden)} is not visible")
    return CudaBackend(names.index(uuids[0]), f"process {os.getpid()}")

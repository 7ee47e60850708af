"""Whether this process sees a GPU, asked of the driver itself: needs neither CuPy nor a context."""

from __future__ import annotations

import ctypes
import functools
import os

NO_DRIVER = "libcuda.so.1 cannot be loaded: no NVIDIA driver here"
NONE_VISIBLE = "no GPU is visible"
# Its driver empties memory when a handle of it is taken, and refuses pools that it offers.
ON_WSL = "mpishare uses no GPU on WSL, whose driver shares no memory between processes reliably"
_NO_DEVICE = 100


@functools.cache  # each opening searches the file system
def library() -> ctypes.CDLL:
    """Return the driver; `OSError` where there is none."""
    return ctypes.CDLL("libcuda.so.1")


@functools.cache  # a process that has no GPU gets none, and the driver takes 60 ms to see that
def why_no_gpu() -> str | None:
    """Return why this process sees no GPU, or may not use it; None where it sees one."""
    if "microsoft" in os.uname().release.lower():
        return ON_WSL
    try:
        driver = library()
    except OSError:
        return NO_DRIVER
    if code := driver.cuInit(0):
        return f"cuInit returned {code}" + (f": {NONE_VISIBLE}" if code == _NO_DEVICE else "")
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    return None if count.value else "the driver shows no GPU"


def driver_major() -> int:
    """Return the CUDA version of the driver."""
    version = ctypes.c_int()
    library().cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000

"""The kernels of halo exchanges: compiled once for a number of fields, launched without CuPy."""

from __future__ import annotations

import functools
from pathlib import Path

import cupy

from mpishare.errors import UnsupportedError

_MOST_FIELDS = 448  # 3.5 KiB of the 4 KiB that a launch can pass


@functools.cache
def kernel(name: str, nfields: int, depth: int, device: int) -> int:
    """Return the function of a kernel, loaded for the current device. Local.

    Parameters
    ----------
    name : str
        ``relay``, ``add`` or ``fused``.
    nfields : int
        Of the plan.
    depth : int
        Units that a thread has on their way at once.
    device : int
        The current one, since functions belong to a device.
    """
    if nfields > _MOST_FIELDS:
        raise UnsupportedError(f"{nfields} fields in one plan: {_MOST_FIELDS} are allowed on CUDA")
    del device
    return int(_module(name, nfields, depth).get_function(name).kernel.ptr)


@functools.cache
def _module(name: str, nfields: int, depth: int) -> cupy.RawModule:
    options = f"-DNFIELDS={nfields}", f"-DDEPTH={depth}"
    return cupy.RawModule(code=source(name), options=options)


def source(name: str) -> str:
    """Return the CUDA source of a kernel."""
    folder = Path(__file__).parent
    text = (folder / ("fused.cu" if name == "fused" else "relay.cu")).read_text()
    # In place, since the compiler is given a text and knows no folder.
    return text.replace('#include "cells.cuh"', (folder / "cells.cuh").read_text())

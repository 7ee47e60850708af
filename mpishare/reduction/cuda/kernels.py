"""The kernels of reductions: one of each kind for each dtype, operation and number of ranks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import cupy

from mpishare.plans.gpu.sources import source
from mpishare.reduction.cuda.records import options

if TYPE_CHECKING:
    from mpishare.reduction.cuda.records import Form
    from mpishare.reduction.operation import Operation

_FILES = {"pack": "streamed.cu", "fold": "streamed.cu"}  # others: as the kernel


@functools.cache
def kernel(name: str, operation: Operation, nranks: int, device: int, form: Form) -> int:
    """Return the driver's handle of a kernel, loaded on the current device, to which it belongs."""
    del device
    given = options(operation, nranks, form)
    return int(_module(_FILES.get(name, f"{name}.cu"), given).get_function(name).kernel.ptr)


@functools.cache
def _module(file: str, given: tuple[str, ...]) -> cupy.RawModule:
    return cupy.RawModule(code=source(Path(__file__).with_name(file)), options=given)

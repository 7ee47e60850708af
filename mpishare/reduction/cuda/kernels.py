"""The kernels of reductions: one of each kind for each dtype, operation and number of ranks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from mpishare.backends import kernels
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
    code = source(Path(__file__).with_name(_FILES.get(name, f"{name}.cu")))
    return kernels.kernel(code, name, options(operation, nranks, form))

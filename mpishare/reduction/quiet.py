"""Arithmetic without NumPy's floating-point warnings, for any `numpy.errstate` of the user.

A reduction must end alike on all ranks and backends: an overflow gives inf, not an exception on
those ranks that happen to add these elements. Entering `numpy.errstate` takes longer than adding a
few numbers, so it is set once, in a context of its own.
"""

from __future__ import annotations

from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[..., Any]


def quiet_runner() -> Run:
    """Return ``run(function, *arguments)``, which calls without warnings."""
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":
        return _run_with_errstate  # there it belongs to the thread, not to the context
    context = copy_context()
    context.run(np.seterr, all="ignore")
    return context.run


def _run_with_errstate(function: Callable[..., Any], *arguments: Any) -> Any:
    with np.errstate(all="ignore"):
        return function(*arguments)

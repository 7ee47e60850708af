"""The accepted forms of a stream."""

from __future__ import annotations

import reprlib
from typing import Any


def handle_of(stream: Any) -> int:
    """Return the handle of a stream: CuPy's, PyTorch's, any `__cuda_stream__`, or an int.

    Else raise `TypeError`. The host backend, without streams, checks its arguments all the same: so
    a wrong one does not first fail on a GPU.
    """
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream
    for name in ("ptr", "cuda_stream"):
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return handle
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is None:
        raise TypeError(
            f"stream must be None, an int >= 0, or an object with .ptr, .cuda_stream or "
            f"__cuda_stream__, not {reprlib.repr(stream)}"
        )
    return int((protocol() if callable(protocol) else protocol)[1])

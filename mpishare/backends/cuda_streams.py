"""CuPy's current stream, changed for a while."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import cupy

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Make a CuPy stream of the current device current inside of a `with` block. Local.

    CuPy's own ``with stream:`` goes back to the stream of the enclosing ``with``, and so forgets
    one that ``use()`` made current (14.2, `_ThreadLocal.pop_stream` in cupy/cuda/stream.pyx).
    """
    previous = cupy.cuda.get_current_stream()
    stream.use()
    try:
        yield
    finally:
        previous.use()

"""A temporary current stream of CuPy."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

import cupy

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Make a CuPy stream of the current device current inside of a `with` block.

    CuPy's own ``with stream:`` goes back to the stream of the enclosing ``with``, and so forgets
    one that ``use()`` made current (14.2, `_ThreadLocal.pop_stream` in cupy/cuda/stream.pyx).
    """
    previous = cupy.cuda.get_current_stream()
    try:
        with stream:  # not use(): a ``with`` of the caller within ours would forget that
            yield
    finally:
        if cupy.cuda.get_current_stream() != previous:
            previous.use()


def borrowed(handle: int, device: int = -1) -> Any:
    """Return a CuPy stream of a handle that others own."""
    with warnings.catch_warnings():
        # CuPy 14's advice, `Stream.from_external`, destroys the stream in the end.
        warnings.simplefilter("ignore", DeprecationWarning)
        return cupy.cuda.ExternalStream(handle, device)

"""A variant whose step is captured into a CUDA graph once, and launched from then on."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from mpishare.bench.comparison import Wrapper
from mpishare.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.bench.comparison import Variant
    from mpishare.bench.session import Session


def capture(session: Session, work: Callable[[], object]) -> Any:
    """Return the graph of what `work` puts on the stream.

    Collective: works once first, since what a library sets up or loads at its first use must not be
    captured. Raises `UnsupportedError` if it cannot be captured.
    """
    stream = session.stream
    work()
    session.synchronize()
    try:
        stream.begin_capture()
        work()
        return stream.end_capture()
    except RuntimeError as exc:  # CuPy's of CUDA and of NCCL
        # End the capture in any case, and report the first error.
        with suppress(RuntimeError):
            stream.end_capture()
        raise UnsupportedError(f"cannot be captured into a graph: {exc}") from exc


class Captured(Wrapper):
    """The step of `inner` as one graph. Collective, see `capture`."""

    def __init__(self, session: Session, inner: Variant) -> None:
        super().__init__(inner)
        self._stream = session.stream
        self._graph = capture(session, inner.step)

    def step(self) -> None:
        self._graph.launch(self._stream)

    @property
    def call(self) -> Callable[[], object]:
        return partial(self._graph.launch, self._stream)

    def close(self) -> None:
        self._stream.synchronize()
        del self._graph
        super().close()

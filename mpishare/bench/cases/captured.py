"""An arm whose step is captured into a graph once and launched from then on. CUDA only."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from mpishare.bench.arm import Arm
from mpishare.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.bench.session import Session


class Captured(Arm):
    """The step of `arm` as one graph.

    Collective: does one step first, since what a library sets up at its first use, or loads, is not
    to be captured.

    Raises
    ------
    UnsupportedError
        If the step cannot be captured.
    """

    def __init__(self, session: Session, arm: Arm) -> None:
        stream = session.stream
        self._arm = arm
        self.moves = arm.moves
        self._session = session
        self._stream = stream
        arm.step()
        session.synchronize()
        try:
            stream.begin_capture()
            arm.step()
            self._graph = stream.end_capture()
        except RuntimeError as exc:  # CuPy's of CUDA and of NCCL
            # The capture is over, whatever that says: the first error is the one to tell.
            with suppress(RuntimeError):
                stream.end_capture()
            raise UnsupportedError(f"cannot be captured into a graph: {exc}") from exc

    def step(self) -> None:
        """Launch the graph."""
        self._graph.launch(self._stream)

    @property
    def call(self) -> Callable[[], object]:
        """The launch of the graph."""
        return partial(self._graph.launch, self._stream)

    def fill(self, token: int) -> None:
        """Write what this rank sends."""
        self._arm.fill(token)

    def poison(self) -> None:
        """Overwrite what this rank received."""
        self._arm.poison()

    def count(self, token: int) -> None:
        """Count the words received that are not those of `token`."""
        self._arm.count(token)

    def checked_step(self, token: int) -> None:
        """Do one step as the arm checks its own."""
        self._arm.check_around(self.step, token)

    def wrong(self) -> int:
        """Return how many words were wrong."""
        return self._arm.wrong()

    def close(self) -> None:
        """Free the graph, and then what its nodes use."""
        self._session.synchronize()
        del self._graph
        self._arm.close()

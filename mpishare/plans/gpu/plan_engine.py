"""The base of engines on CUDA: whether calls are over, draining, exit."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from mpishare.coordination.poll import poll
from mpishare.errors import CudaError
from mpishare.plans.gpu.fields import is_captured

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.plans.gpu.flags import PinnedFlags
    from mpishare.runtime.context import NodeContext
    from mpishare.windows.stream_chain import StreamChain


class CudaPlanEngine:
    """Calls that are enqueued on streams, and counted in the flags of the plan."""

    name: str
    _context: NodeContext
    _backend: Any
    _device: int
    _chain: StreamChain
    _flags: PinnedFlags
    _buffers: Any

    @property
    def calls(self) -> memoryview:
        """One word: this rank's count of calls."""
        return self._flags.calls

    @property
    def is_closed(self) -> bool:
        return not self._flags.calls

    def is_captured(self, fields: Sequence[Any], stream: Any) -> bool:
        return is_captured(fields, stream, self._backend)

    def pending(self) -> list[int]:
        return self._flags.pending()

    def finish_at_exit(self, deadline: float) -> None:
        """Publish that all calls have ended, if they do by the deadline.

        Replays of a user's graph are not seen. Polls, since a process that exits cannot start a
        thread.
        """
        is_over = False

        def is_done() -> bool:
            nonlocal is_over
            is_over = self._is_over()
            return is_over or self._context.agreement.failure is not None

        try:
            poll(is_done, deadline - time.monotonic())
        except CudaError:
            return  # work on a failed GPU never ends
        if is_over:
            self._flags.mark_finished()

    def _is_over(self) -> bool:
        return self._chain.is_over()

    def drain(self) -> None:
        """Wait until no call is under way on this rank, with the node's deadline."""
        self._context.drain(f"{self.name}: close")

    def release(self) -> None:
        """Unmap memory of other ranks."""
        self._buffers.release()

"""What the engines of all plans on CUDA have in common: whether calls are over, and the end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from mpishare.coordination.poll import poll
from mpishare.errors import CudaError
from mpishare.halo.cuda.fields import is_captured

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.context import NodeContext
    from mpishare.halo.cuda.flags import PinnedFlags
    from mpishare.ordering.stream_chain import StreamChain


class CudaPlanEngine:
    """Calls that are enqueued on streams, and counted in flags that all ranks of the plan see."""

    name: str
    _context: NodeContext
    _backend: Any
    _device: int
    _chain: StreamChain
    _flags: PinnedFlags
    _buffers: Any

    @property
    def calls(self) -> memoryview:
        """One word: how many calls this rank has made."""
        return self._flags.calls

    @property
    def is_closed(self) -> bool:
        """Whether the memory of its launches is gone."""
        return not self._flags.calls

    def is_captured(self, fields: Sequence[Any], stream: Any) -> bool:
        """Whether the stream of a call is being captured into a graph. Local."""
        return is_captured(fields, stream, self._backend)

    def pending(self) -> list[int]:
        """Ranks of the node that this rank's GPU waits for, or that have called less often."""
        return self._flags.pending()

    def finish_at_exit(self, deadline: float) -> None:
        """Tell the other ranks if all calls end by then. Local.

        Replays of a user's graph are not seen. By polling, since a process that ends cannot start
        a thread.
        """
        is_over = False

        def is_done() -> bool:
            nonlocal is_over
            is_over = self._is_over()
            return is_over or self._context.agreement.failure is not None

        try:
            poll(is_done, deadline - time.monotonic())
        except CudaError:
            return  # what is enqueued on a failed GPU never ends
        if is_over:
            self._flags.mark_finished()

    def _is_over(self) -> bool:
        """Whether all that was enqueued is over."""
        return self._chain.is_over()

    def drain(self) -> None:
        """Wait until nothing is under way on this rank, with the node's deadline."""
        self._context.drain(f"{self.name}: close")

    def release(self) -> None:
        """Unmap what other ranks own. Local."""
        self._buffers.release()

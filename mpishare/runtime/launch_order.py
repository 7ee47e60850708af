"""Kernels that wait for other ranks: their order on one GPU, and how many blocks it has at once."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

from mpishare.coordination import recording
from mpishare.runtime.stream_chain import StreamChain

if TYPE_CHECKING:
    from mpishare.backends import StreamInfo
    from mpishare.coordination.recording import Recording
    from mpishare.runtime.context import NodeContext

_SM_COUNT = 16  # cudaDevAttrMultiProcessorCount


class LaunchOrder:
    """Serializes the fused kernels of several plans on one GPU; side by side they could deadlock.

    A fused kernel waits for other ranks while it occupies a part of its GPU. On streams of their
    own, the kernels of one plan could fill one GPU, those of another the next, and each would wait
    for a kernel that cannot start. The order of the calls is the same on all ranks. A single plan
    needs no order: the next is made only when no kernel is under way.
    """

    _of_device: ClassVar[dict[int, LaunchOrder]] = {}

    def __init__(self, backend: Any) -> None:
        self.chain = StreamChain(backend, "fused kernels")
        self.plans = 0
        self._backend = backend
        self._captured: tuple[Recording, int] | None = None  # of the last launch
        self._event: Any = None

    @classmethod
    def join(cls, backend: Any) -> LaunchOrder:
        """Return the order of a backend's GPU, with one more plan."""
        order = cls._of_device.setdefault(backend.device.ordinal, cls(backend))
        order.plans += 1
        return order

    def begin(self, entered: StreamInfo) -> None:
        """Let a launch follow the last one; one that is captured, that of its capture."""
        stream, owner, stays_alive, is_captured = entered
        if is_captured:
            last = self._captured
            if last is not None and last[0] is recording.current() and last[1] != stream:
                self._backend.wait_event(self._event, stream)
        elif self.plans > 1:
            self.chain.follow(stream, owner, stays_alive=stays_alive)

    def end(self, entered: StreamInfo) -> None:
        """Mark the end of a launch."""
        stream, _, stays_alive, is_captured = entered
        if is_captured:
            now = recording.current()
            if now is None:
                return  # a capture of the user's own, which may have ended since the last launch
            if self._event is None:
                self._event = self._backend.local_event()
            self._backend.record(self._event, stream)
            self._captured = now, stream
        elif self.plans > 1 and not stays_alive:
            self.chain.leave()

    def leave(self) -> None:
        """Count one plan less, once its kernels have ended."""
        self.plans -= 1
        self.chain.end()
        if self._event is not None:
            self._backend.close_events([self._event])
            self._event = self._captured = None


@functools.cache
def sm_count(device: int) -> int:
    """Return the number of multiprocessors of a GPU."""
    import cupy

    return int(cupy.cuda.runtime.deviceGetAttribute(_SM_COUNT, device))


def ranks_per_gpu(context: NodeContext) -> int:
    """Return how many ranks use this rank's GPU; those of other nodes on this machine count too."""
    return context.all_uuids.count(context.uuids[context.rank])


def waiting_blocks(context: NodeContext, per_sm: int) -> int:
    """Return the most blocks of a launch, so that the launches of all ranks on a GPU fit at once.

    `per_sm` are those of one rank that a multiprocessor takes.
    """
    backend: Any = context.backend
    device = backend.device
    sms, nranks = sm_count(device.ordinal), ranks_per_gpu(context)
    if nranks == 1 or not device.mps:
        # The GPU is this rank's alone, always or for a time slice.
        return per_sm * sms
    # Under MPS the waiting ranks together must leave room for the one they wait for. With half
    # a block per SM each (half of what fits) four ranks were seen to wait for a kernel that was
    # not scheduled.
    return min(per_sm, 1) * max(1, sms // nranks)

"""The order of the kernels on one GPU that wait for other ranks: of plans and of windows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from mpishare.coordination import recording
from mpishare.runtime.stream_chain import StreamChain

if TYPE_CHECKING:
    from mpishare.backends import StreamInfo
    from mpishare.coordination.recording import Recording


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

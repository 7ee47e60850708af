"""The order of the fused kernels of several plans on one GPU."""

from __future__ import annotations

from typing import Any, ClassVar

from mpishare.ordering.stream_chain import StreamChain


class LaunchOrder:
    """Serializes the fused kernels of several plans on one GPU; side by side they could deadlock.

    A fused kernel waits for other ranks while it occupies a part of its GPU. On streams of their
    own, the kernels of one plan could fill one GPU, those of another the next, and each would wait
    for a kernel that cannot start. The order of the calls is the same on all ranks. A single plan
    needs no order: the next is made only when no kernel is under way.

    Attributes
    ----------
    plans : int
        How many plans launch fused kernels on this GPU.
    chain : StreamChain
        Their launches, in order.
    """

    _of_device: ClassVar[dict[int, LaunchOrder]] = {}

    def __init__(self, backend: Any) -> None:
        self.chain = StreamChain(backend, "fused kernels")
        self.plans = 0

    @classmethod
    def join(cls, backend: Any) -> LaunchOrder:
        """Return the order of a backend's GPU, with one more plan."""
        order = cls._of_device.setdefault(backend.device.ordinal, cls(backend))
        order.plans += 1
        return order

    def leave(self) -> None:
        """Remove a plan, whose kernels have all ended."""
        self.plans -= 1
        self.chain.end()

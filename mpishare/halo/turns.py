"""The order of fused kernels that share a GPU in one process."""

from __future__ import annotations

from typing import Any, ClassVar

from mpishare.chain import Chain


class Turns:
    """The fused kernels of all plans of this process on one GPU, in the order of the calls.

    They wait for those of other ranks while they hold a part of the GPU. On streams of their own,
    two plans could each fill one GPU and wait for the other on the next; the order of the calls is
    the same on all ranks. One plan alone needs no order: another is made only when all is over.

    Attributes
    ----------
    plans : int
        How many there are.
    """

    _all: ClassVar[dict[int, Turns]] = {}

    def __init__(self, backend: Any) -> None:
        self.chain = Chain(backend, "fused kernels")
        self.plans = 0

    @classmethod
    def on(cls, backend: Any) -> Turns:
        """Return those of a backend's GPU, with one more plan."""
        turns = cls._all.setdefault(backend.device.ordinal, cls(backend))
        turns.plans += 1
        return turns

    def leave(self) -> None:
        """Count one plan less; all that was put on streams is over."""
        self.plans -= 1
        self.chain.end()

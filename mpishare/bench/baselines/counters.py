"""Bare stream memory operations: what the order between ranks costs with no library around it.

Each rank has a word for every rank and purpose in its own device memory, 128 bytes apart. A peer
writes the number of the step there; the owner's stream waits until the word has reached it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishare.backends.driver import CudaSignals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.bench.session import Session

_SLOT_NBYTES = 128
_PURPOSES = 2


class Counters:
    """Words in device memory, and batches of stream memory operations on them. CUDA only.

    Collective, host-blocking: makes a window.
    """

    def __init__(self, session: Session) -> None:
        node = session.node
        nbytes = node.size * _PURPOSES * _SLOT_NBYTES
        self._window = node.allocate_each((nbytes // 8,), "u8", fill=0)
        self._rank = node.rank
        self._bases = [int(self._window.segment(rank).data.ptr) for rank in range(node.size)]
        self._stream = int(session.stream.ptr)

    def _address(self, owner: int, writer: int, purpose: int) -> int:
        return self._bases[owner] + (writer * _PURPOSES + purpose) * _SLOT_NBYTES

    def batch(
        self, writes: Sequence[int], waits: Sequence[int], purpose: int = 0
    ) -> Callable[[], None]:
        """Return a call that enqueues one batch, of the number of the call. Stream-ordered.

        The batch writes that number to the words of the ranks `writes`, then waits until the ranks
        `waits` have written it here.
        """
        operations = [("write", self._address(peer, self._rank, purpose)) for peer in writes]
        operations += [("wait", self._address(self._rank, peer, purpose)) for peer in waits]
        count, stream, value = len(operations), self._stream, 0
        signals = CudaSignals(operations, 0, "the bench's bare operations")

        def enqueue() -> None:
            nonlocal value
            value += 1
            if count:
                signals.enqueue(stream, [value] * count)

        return enqueue

    def close(self) -> None:
        """Close the window. Collective."""
        self._window.close()

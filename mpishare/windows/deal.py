"""The two ends of a channel whose frames are dealt: each goes to the first consumer that asks.

Every consumer has four counters, each written by one side: `full` and `sent` as in `slots`, but for
the frames dealt to it; `free`, which counts the frames it gave back; and `asked`, the number of the
frame that it waits for. Behind `sent` stands the slot of its last frame. Since nothing is dealt to
a consumer that has not asked, it has read that word before the next is written there.

The producer writes into any free slot, and chooses the consumer at the end of its block. On streams
its host waits for a slot that is really free, so that its stream never waits; of the consumers that
ask, whose streams may lag behind their hosts, the one with the fewest unfinished frames is chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.coordination.poll import comes_at_once
from mpishare.coordination.where import find_cycle
from mpishare.errors import EpochError
from mpishare.windows.slots import ASKED, ENDED, FREE, FULL, SENT, WORDS, Get, Put

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.windows.slots import Ring

_SLOT = SENT + 1


class DealtPut(Put):
    """The producer's end: a block is entered with any free slot, and left with a frame dealt."""

    def __init__(self, ring: Ring, awaited: dict[int, int]) -> None:
        self._begins = [at - FREE for at in awaited.values()]
        super().__init__(ring, awaited, [at + FULL for at in self._begins])
        self._dealt = [0] * len(awaited)
        # The consumer of each slot's last frame, and the number of this frame among its own.
        self._last = [(0, 0)] * len(ring.arrays)
        self._slot = self._chosen = 0
        self._is_full = False  # this rank's host waits for a slot

    def __enter__(self) -> Any:
        if self.is_open or self.is_over:
            self.refuse()
        if self._has_streams:
            self._number = self._chain.enter(self._name, self.stream)
        if not self._find_slot():
            self._is_full = True
            try:
                self._wait_until(self._find_slot, is_on_stream=self._has_streams)
            finally:
                self._is_full = False
        self.is_open = True
        return self._arrays[self._slot]

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if kind is not None or not self.is_open:
            super().__exit__(kind, error, trace)
            return
        try:
            if not self._find_consumer():
                self._wait_until(self._find_consumer)
        except BaseException as raised:
            super().__exit__(type(raised), raised, None)  # the frame is not sent
            raise
        self._aim()
        try:
            super().__exit__(None, None, None)
        finally:
            # Also where an interrupt came behind the signal, amid the copy for viewers.
            if self._count > self._dealt[self._chosen]:
                self._dealt[self._chosen] = self._count
                self._last[self._slot] = self._chosen, self._count

    def _publish_end(self) -> None:
        for at, dealt in zip(self._begins, self._dealt, strict=True):
            self._view[at + SENT] = dealt + ENDED

    def pending(self) -> list[int]:
        """Return the ranks whose streams hold the slots that this rank waits for."""
        return self._holders() if self._is_full and self._has_streams else []

    def written(self) -> Any:
        """Return the slot of the last frame."""
        return self._arrays[self._slot]

    def _find_slot(self) -> bool:
        view, places = self._view, self._places
        for slot, (place, number) in enumerate(self._last):
            if view[places[place]] >= number:
                self._slot = slot
                self._memory_barrier()
                return True
        return False

    def _find_consumer(self) -> bool:
        """Choose among the consumers that ask, from the one after the last chosen on."""
        view, dealt, fewest = self._view, self._dealt, ENDED
        chosen, count = self._chosen, len(dealt)
        for step in range(1, count + 1):
            place = (chosen + step) % count
            at, number = self._begins[place], dealt[place]
            unfinished = number - view[at + FREE]
            if view[at + ASKED] > number and -1 < unfinished < fewest:
                fewest, self._chosen = unfinished, place
        return fewest < ENDED

    def _aim(self) -> None:
        """Let the end of the block signal the chosen consumer."""
        at, self._count = self._begins[self._chosen], self._dealt[self._chosen]
        self._view[at + _SLOT] = self._slot
        self._sent_at = at + SENT
        if self._has_streams:
            self._write = self._writes[self._chosen]

    def _wait_until(self, find: Callable[[], bool], *, is_on_stream: bool = False) -> None:
        """Wait on the host for any consumer: for one that asks, or gives a slot back."""
        if is_on_stream:
            self._context.wait_until(find, self._call)
            return
        if not comes_at_once(find):
            agreement = self._context.agreement
            agreement.wait(self._call, lambda: [] if find() else self._late())
        self._context.check_released()
        if not find():
            raise EpochError(
                f"{self._call} failed at the end of its block: all consumers have closed the "
                "channel, and nobody takes this frame"
            )

    def _holders(self) -> list[int]:
        return [self._ranks[place] for place in sorted({place for place, _ in self._last})]

    def _late(self) -> list[int]:
        """Return the ranks to wait for, any of which is enough.

        A rank that waits for this one comes no sooner than another: it is named only where all do,
        else a collective call of one consumer would look like a deadlock.
        """
        view, ranks = self._view, self._holders() if self._is_full else self._ranks
        here = [rank for rank in ranks if view[self._places[self._ranks.index(rank)]] < ENDED]
        block = self._context.agreement.block
        return [rank for rank in here if not find_cycle(block, [rank])] or here


class DealtGet(Get):
    """A consumer's end, on its own counters alone: entering a block asks for a frame."""

    def __init__(self, ring: Ring, producer: int, place: int) -> None:
        whole, begin = ring.counters, WORDS * place
        view, address = whole.view[begin : begin + WORDS], whole.address + 8 * begin
        mine = whole._replace(view=view, address=address)
        super().__init__(ring._replace(counters=mine), producer, 0)

    def __enter__(self) -> Any:
        if not self.is_over:
            self._view[ASKED] = self._count + 1
        super().__enter__()
        return self._arrays[self._view[_SLOT]]

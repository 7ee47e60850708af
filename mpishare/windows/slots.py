"""The two ends of a channel: blocks that wait for a slot, and signal that it is written or free.

Frame k, counted from 1, lies in slot k modulo the number of slots. The producer waits until every
consumer has freed frame k - slots; its counter `full` counts written frames, and each consumer's
counter `free` the freed ones. Waits compare cyclically, so that the first frames, which wait for a
count below zero, go on at once. With streams the streams wait, and a consumer's host waits only for
`sent`, the count of calls of `put`: this includes the end of the stream. Without streams `sent` is
`full` as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from mpishare.coordination.counters import NO_COUNTERS, SLOT_WORDS
from mpishare.errors import ClosedError, EpochError, UnsupportedError
from mpishare.runtime.stream_chain import StreamChain
from mpishare.windows.epochs import reach

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.coordination.counters import Counters
    from mpishare.runtime.context import NodeContext
    from mpishare.windows.publisher import Publication

# On streams: frames that the producer's host enqueues before there is room for them. The queue of a
# stream is finite, and a host that fills it would wait in the driver, without a deadline.
AHEAD = 64

WORDS = 4 * SLOT_WORDS  # of each consumer; all of them look at `full` and `sent` of the first
FULL, SENT, FREE, ASKED = range(0, WORDS, SLOT_WORDS)  # the places of the counters among them
# Added to the counter of a rank that sends or takes no more frames.
ENDED = 1 << 61


class Ring(NamedTuple):
    """The slots of a channel as one rank has them, and the counters of both ends."""

    context: NodeContext
    name: str
    counters: Counters
    arrays: list[Any]


class Block:
    """The ``with`` block of one end of a channel, made once and entered for each frame.

    `awaited` has the places of the other end's counters by rank, `mine` those of this rank's.
    """

    def __init__(self, ring: Ring, call: str, awaited: dict[int, int], mine: Sequence[int]) -> None:
        context, name, counters, arrays = ring
        backend, address = context.backend, counters.address
        self.stream: Any = None
        self.is_open = False
        self.is_over = False
        self._name, self._call = call, f"{name}: {call}"
        self._count = 0  # of blocks that have ended
        self._arrays = arrays
        self._slots = len(arrays)
        self._view = counters.view
        self._ranks, self._places = tuple(awaited), tuple(awaited.values())
        self._awaited_at = awaited
        self._memory_barrier = context.memory_barrier
        self._context = context
        self._chain = StreamChain(backend, name)
        self._has_streams = backend.has_streams
        self._number = 0  # the handle of the block's stream
        self._awaited = 0  # by streams: the count of the last wait
        if self._has_streams:
            self._is_capturing = backend.is_capturing
            self._waits = backend.signals([("wait", address + 8 * at) for at in self._places])
            self._writes = [backend.signals([("write", address + 8 * at)]) for at in mine]
            self._write = self._writes[0]

    def __getattr__(self, name: str) -> Any:
        """Refuse attributes of the slot: the block was mistaken for it."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(self._not_a_slot())

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(self._not_a_slot())

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError(self._not_a_slot())

    def _not_a_slot(self) -> str:
        call = self._call.rpartition(" ")[2]
        return (
            f"{self._call} failed: the slot is there inside a with block only. Write "
            f"with channel.{call}() as slot: ..."
        )

    def is_done(self) -> bool:
        """Return whether the work of the blocks that have ended is done."""
        return self._chain.is_over()

    def pending(self) -> list[int]:
        """Return the ranks for whose signals this rank's streams wait."""
        if not self._has_streams:
            return []
        view, count = self._view, self._awaited
        return [rank for rank, place in self._awaited_at.items() if view[place] < count]

    def close(self) -> None:
        """Drop the slots and the stream."""
        self.is_open = False
        self.is_over = True
        self._arrays = []
        self._view = NO_COUNTERS.view
        self._chain.end()

    def refuse(self, failed: str = "") -> NoReturn:
        """Raise the reason why the block cannot be entered."""
        failed = failed or f"{self._call} failed at the begin of its block"
        if self.is_open:
            # Python raises an interrupt also before the first line of `__exit__`.
            raise EpochError(
                f"{failed}: a slot is open. Leave its block first. If an interrupt (Ctrl-C) came "
                "at its end, close the channel and make another."
            )
        if not self._arrays:
            raise ClosedError(f"{failed}: the channel is closed")
        raise EpochError(f"{failed}: the stream was ended. Make another channel for more frames.")

    def _wait_on_stream(self, count: int) -> None:
        """Let the stream wait until the counters of the other end are at least `count`."""
        if self._places:
            self._waits.enqueue(self._number, [count] * len(self._places))
        self._awaited = count

    def _write_on_stream(self, count: int) -> None:
        """Raise the counter of this end, after the stream's work so far."""
        if self._is_capturing(self._number):
            raise UnsupportedError(
                f"{self._call} failed at the end of its block: the stream is being captured into "
                "a graph. End the capture inside of the block."
            )
        self._write.enqueue(self._number, [count])
        self._chain.leave()


class Put(Block):
    """The producer's end: a block is entered with a free slot, and left with a frame sent."""

    def __init__(self, ring: Ring, awaited: dict[int, int], mine: Sequence[int] = (FULL,)) -> None:
        super().__init__(ring, "put", awaited, mine)
        self._sent_at = SENT
        self.publication: Publication | None = None  # for processes that attach
        self._ahead = AHEAD if self._has_streams else 0
        # The last frame that is known to have a free slot; without a consumer there is no last.
        self._room = self._slots if awaited else ENDED

    def __enter__(self) -> Any:
        if self.is_open or self.is_over:
            self.refuse()
        number = self._count + 1
        if self._has_streams:
            self._number = self._chain.enter(self._name, self.stream)
        if number > self._room:
            self._find_room(number)
        self.is_open = True
        return self._arrays[number % self._slots]

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        was_open, self.is_open = self.is_open, False
        if kind is not None:
            self._chain.leave()  # without a signal
            return
        if not was_open:
            raise ClosedError(f"{self._call} failed: the channel was closed in its block")
        number = self._count + 1
        if self._has_streams:
            self._write_on_stream(number)
        self._memory_barrier()
        self._view[self._sent_at] = self._count = number
        if self.publication is not None:
            self.publication.take(self.written(), self._chain, self.stream)

    def written(self) -> Any:
        """Return the slot of the last frame."""
        return self._arrays[self._count % self._slots]

    def end(self) -> None:
        """Publish that the last frame has been sent."""
        self.is_over = True
        self._memory_barrier()
        self._publish_end()
        if self.publication is not None:
            self.publication.end()

    def _publish_end(self) -> None:
        self._view[SENT] = self._count + ENDED

    def _find_room(self, number: int) -> None:
        oldest = number - self._slots
        # A freed slot is free for the host and for the stream: reading the counter is cheaper.
        self._room = (
            reach(self._context, self._call, self._view, self._awaited_at, oldest - self._ahead)
            + self._slots
        )
        if number > self._room and self._has_streams:
            self._wait_on_stream(oldest)


class Get(Block):
    """A consumer's end: a block is entered with a frame, and left with its slot freed."""

    def __init__(self, ring: Ring, producer: int, place: int) -> None:
        awaited = {producer: FULL if ring.context.backend.has_streams else SENT}
        self._mine = free_at(place)
        super().__init__(ring, "get", awaited, [self._mine])
        self._sent = 0  # frames that are known to be sent

    def __enter__(self) -> Any:
        if self.is_open or self.is_over:
            self.refuse()
        number = self._count + 1
        if self._has_streams:
            self._number = self._chain.enter(self._name, self.stream)
        if number > self._sent:
            self._find_sent(number)
        if self._has_streams:
            self._wait_on_stream(number)
        self.is_open = True
        return self._arrays[number % self._slots]

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not self.is_open:
            return  # the channel was closed in its block
        self.is_open = False
        number = self._count + 1
        if self._has_streams:
            self._write_on_stream(number)
        else:
            self._memory_barrier()
            self._view[self._mine] = number
        self._count = number

    def end(self) -> None:
        """Publish that this rank takes no more frames: the producer no longer waits for it."""
        if self._has_streams:
            self._number = self._chain.enter(self._name, None)
            self._write_on_stream(ENDED)
        else:
            self._memory_barrier()
            self._view[self._mine] = ENDED

    def _find_sent(self, number: int) -> None:
        sent = reach(self._context, self._call, self._view, {self._ranks[0]: SENT}, number)
        if sent >= ENDED:
            sent -= ENDED
            if number > sent:
                raise EOFError(f"{self._call}: rank {self._ranks[0]} ended the stream")
        self._sent = sent


def free_at(place: int) -> int:
    return WORDS * place + FREE

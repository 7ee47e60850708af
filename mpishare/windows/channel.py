"""Channels: one rank streams arrays to others, through a ring of slots that all of them map."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mpishare.backends import handle_of
from mpishare.coordination.counters import NO_COUNTERS
from mpishare.errors import format_nbytes
from mpishare.memory.arguments import require_bool
from mpishare.memory.memory import ArrayLayout
from mpishare.runtime.context import NodeObject
from mpishare.windows.allocate import Source, make_window
from mpishare.windows.arguments import (
    agree,
    check_layout,
    check_name,
    count_of,
    owner_of,
    receivers,
)
from mpishare.windows.deal import DealtGet, DealtPut
from mpishare.windows.publisher import MOST_LAG
from mpishare.windows.slots import WORDS, Block, Get, Put, Ring, free_at
from mpishare.windows.undo import undoing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import ExitStack

    from mpishare.memory.types import Stream
    from mpishare.runtime.context import NodeContext
    from mpishare.windows.publisher import Publication
    from mpishare.windows.window import Window

_SLOTS = 4

log = logging.getLogger("mpishare.channel")


class Channel(NodeObject):
    """A stream of arrays from one rank of a node to others. Made by `Node.channel`.

    Every consumer gets every frame, in the order in which they were put; or, of a channel made with
    ``deal=True``, each frame goes to the first consumer that asks for one.
    Calls raise `ClosedError` once the channel is closed, and `PeerTimeout` or `PeerError` where a
    rank that they wait for is gone or late.

    Attributes
    ----------
    name : str
        As given; else ``channel 2``: the number is the same on every rank, and never used again.
    producer : int
        The rank that puts, in ``node.comm``.
    consumers : tuple of int
        The ranks that get.
    shape : tuple of int
        Of one frame.
    dtype : numpy.dtype
        Of the elements.
    nbytes : int, bytes
        Of one frame.
    slots : int
        Number of frames that the producer may be ahead.
    deal : bool
        Whether each frame goes to one consumer.
    """

    _kind = "channel"
    _closes_first = True  # while its producer waits, no other object could see the streams end

    def __init__(
        self,
        context: NodeContext,
        shape: Any,
        dtype: Any,
        slots: Any,
        producer: Any,
        consumers: Sequence[int] | None,
        deal: Any,
        name: Any,
        lag: Any,
    ) -> None:
        call = "Node.channel"

        def check() -> tuple[dict[str, Any], None]:
            frame = check_layout(context, call, shape, dtype)
            source = owner_of(context, call, producer)
            ranks = receivers(context, call, source, consumers, ("producer", "consumers"))
            is_dealt = require_bool(f"{call} failed: ", "deal", deal)
            default = 2 * len(ranks) or 1 if is_dealt else _SLOTS
            count = default if slots is None else count_of(call, "slots", slots)
            # All of them can be addressed.
            check_layout(context, call, (count, *frame.shape), dtype)
            same = {
                "shape": frame.shape,
                "dtype": str(frame.dtype),
                "slots": count,
                "producer": source,
                "consumers": ranks,
                "deal": is_dealt,
                "name": check_name(call, name),
                "lag": count_of(call, "lag", lag, MOST_LAG),
            }
            return same, None

        same, _ = agree(context, call, check)
        context.release_retained()  # else a loop of channels would keep the slots of each
        source, ranks = same["producer"], tuple(same["consumers"])
        # With one consumer, in its memory: then stores cross the link, and no loads.
        owner = ranks[0] if len(ranks) == 1 else source
        segments = {owner: ArrayLayout((same["slots"], *same["shape"]), np.dtype(dtype))}
        words = WORDS * (len(ranks) or 1)
        with undoing(context, call) as undo:
            mine = Source(segments[owner]) if context.rank == owner else None
            window = make_window(context, call, segments, owner, mine, words=words, is_part=True)
            undo.callback(window.close)
            publication = None if name is None else _publish(context, call, window, same, undo)
        number = context.next_number("channel")
        self.name = window.name = publication.name if publication else f"channel {number}"
        window._publication = publication  # which is closed with it
        self.producer: int = source
        self.consumers: tuple[int, ...] = ranks
        self.deal: bool = same["deal"]
        self.slots: int = window.shape[0]
        self.shape: tuple[int, ...] = window.shape[1:]
        self.dtype: np.dtype[Any] = window.dtype
        self.nbytes: int = window.nbytes // self.slots
        self._context = context
        self._check = context.agreement.check
        self._window = window
        self._counters = window._counters
        self._sending: Put | None = None
        self._receiving: Get | None = None
        self._open_end()
        context.register(self)
        log.info(
            "%s made: rank %d to ranks %s, %d slots of shape %s, dtype %s, %s each, on rank %d",
            self.name,
            source,
            list(ranks),
            self.slots,
            self.shape,
            self.dtype,
            format_nbytes(self.nbytes),
            owner,
        )

    def _open_end(self) -> None:
        """Make the blocks of this rank, if it is an end."""
        rank, window = self._context.rank, self._window
        # With an ellipsis, since a frame may have no axes.
        arrays = [window.array[i, ...] for i in range(self.slots)]
        for slot in arrays if rank in self.consumers else ():
            if isinstance(slot, np.ndarray):  # CuPy has no read-only arrays
                slot.flags.writeable = False
        ring = Ring(self._context, self.name, self._counters, arrays)
        if rank == self.producer:
            awaited = {rank: free_at(place) for place, rank in enumerate(self.consumers)}
            self._sending = (DealtPut if self.deal and awaited else Put)(ring, awaited)
            self._sending.publication = window._publication
        elif rank in self.consumers:
            place = self.consumers.index(rank)
            self._receiving = (DealtGet if self.deal else Get)(ring, self.producer, place)

    def put(self, stream: Stream | None = None) -> Put:
        """Return the block in which the producer writes the next frame. Producer only.

        ``with channel.put() as slot: slot[...] = frame``. Local. At the beginning of the block my
        stream waits until every consumer has given the slot back; at its end the frame is sent.
        Where the block raises, no frame is sent, and the next `put` has the same slot. An interrupt
        (Ctrl-C) amid its last statement may leave the slot open: then the channel must be closed.

        Stream-ordered on CUDA: the host waits only where it is 64 frames ahead of that. On the host
        backend the beginning blocks until the slot is free. The contents of the slot at the
        beginning are undefined.

        Where frames are dealt, the beginning waits on the host for any free slot, and the end for
        any consumer that asks: the frame goes to it, in turn where several do, on streams to one
        with the fewest frames unfinished.

        Parameters
        ----------
        stream : stream, optional
            On which the frame is written. Default: CuPy's current stream.

        Raises
        ------
        PeerTimeout
            If a consumer lags by more than the deadline, or died; `ranks` names it. A stream that
            waits for it is ended by `Node.synchronize`, which raises the same.
        EpochError
            Inside another block of this channel, or after `end`. At the end of the block where
            frames are dealt, if all consumers have closed the channel.
        ValueError
            On a rank that is not the producer.
        TypeError
            If it is given a frame.
        UnsupportedError
            If the stream is being captured.
        """
        self._check()
        block = self._sending
        if block is None or block.is_open or block.is_over:
            self._refuse("put", f"rank {self.producer} is the producer", block)
        if stream is not None and hasattr(stream, "shape"):
            raise TypeError(
                f"{self.name}: put failed: it takes no frame, but a stream. Write "
                "with channel.put() as slot: slot[...] = frame"
            )
        if stream is not None:
            handle_of(stream)
        block.stream = stream
        return block

    def get(self, stream: Stream | None = None) -> Get:
        """Return the block in which a consumer reads the next frame. Consumers only.

        ``with channel.get() as slot: analyse(slot)``. Local. At the beginning of the block the
        host waits until the producer has *called* `put` for this frame, and my stream until it is
        written; at its end, also where it raises, the slot is given back. A consumer must not
        write into the slot, which other consumers read too, and must not read it after the block.
        NumPy's is read-only; CuPy has no such arrays.

        Where frames are dealt, entering the block asks for one: a frame is dealt to no consumer
        that has not asked, so none is lost where a loop is left. An interrupt
        (Ctrl-C) of the wait ends the node; one amid the last statement of the block may leave the
        slot open, as in `put`.

        Parameters
        ----------
        stream : stream, optional
            On which the frame is read. Default: CuPy's current stream.

        Raises
        ------
        EOFError
            At the beginning of the block, after the last frame of a producer that called `end`,
            or that closes the channel or its node, as the end of ``with Node()`` does.
        PeerError
            If the producer left the node by an exception.
        PeerTimeout
            If the producer is late by more than the deadline, or died.
        EpochError
            Inside another block of this channel.
        ValueError
            On a rank that is not a consumer.
        UnsupportedError
            If the stream is being captured.
        """
        self._check()
        block = self._receiving
        if block is None or block.is_open:
            self._refuse("get", f"ranks {list(self.consumers)} are the consumers", block)
        if stream is not None:
            handle_of(stream)
        block.stream = stream
        return block

    def __iter__(self) -> Iterator[Any]:
        """Yield the frames until the end, each inside a `get` of its own. Consumers only.

        Local; errors as those of `get`. The current stream counts, anew for each frame. A slot is
        given back when the next one is asked for, and where the loop is left.
        """
        try:
            while True:
                with self.get() as slot:
                    yield slot
        except EOFError:
            return

    def end(self) -> None:
        """End the stream: after the last frame the consumers get an `EOFError`. Producer only.

        Local; does not block. Ending twice has no effect.

        Raises
        ------
        EpochError
            Inside a `put`.
        ValueError
            On a rank that is not the producer.
        """
        self._check()
        block = self._sending
        if block is None or block.is_open:
            self._refuse("end", f"rank {self.producer} is the producer", block)
        if not block.is_over:
            block.end()

    def close(self) -> None:
        """Close the channel on all ranks; a producer ends its stream first.

        Collective, host-blocking: waits for this process's streams and for the other ranks. Closing
        twice has no effect. A consumer may close before the end: frames that it has not taken are
        lost, and the producer no longer waits for it. Slots that are still held, as by the variable
        of a loop, stay mapped until they are gone, but their contents may change.
        """
        if self._is_closed:
            return
        context, call = self._context, f"{self.name}: close"

        def finish() -> None:
            if (end := self._end) is not None:
                end.end()
            context.drain(call)

        with context.agreement.collective():
            context.agreement.step(call, finish)
            self._abandon()
            self._window.close()
        log.debug("%s closed", self.name)

    @property
    def _end(self) -> Put | Get | None:
        return self._sending or self._receiving

    def _abandon(self) -> None:
        self._is_closed = True
        self._context.unregister(self)
        if (end := self._end) is not None:
            end.close()
        # The blocks hold arrays, and an open one may outlive the channel.
        self._sending = self._receiving = None
        self._counters = NO_COUNTERS

    def _let_go(self) -> bool:
        end = self._end
        return end is None or not end.is_open

    def _is_over(self) -> bool:
        end = self._end
        return end is None or end.is_done()

    def _pending(self) -> list[int]:
        """Return the ranks whose signals this rank's streams wait for."""
        end = self._end
        return [] if end is None else end.pending()

    def _refuse(self, call: str, roles: str, block: Block | None) -> NoReturn:
        """Raise the reason why a call is not allowed now, or on this rank."""
        failed = f"{self.name}: {call} failed"
        if self._is_closed:
            raise self._closed(f"{self.name}: {call}")
        if block is None:
            raise ValueError(
                f"{failed}: {roles}, not rank {self._context.rank}. Call it there, or make the "
                "channel with producer= and consumers=."
            )
        block.refuse(failed)

    def __repr__(self) -> str:
        is_named = not self.name.startswith("channel ")
        name = f"Channel {self.name!r}" if is_named else self.name.capitalize()
        return (
            f"<mpishare.{name}: producer={self.producer}, "
            f"consumers={self.consumers}, shape={self.shape}, dtype={self.dtype}, "
            f"slots={self.slots}{self._state()}>"
        )


def _publish(
    context: NodeContext, call: str, window: Window, same: dict[str, Any], undo: ExitStack
) -> Publication:
    """Let processes outside the job attach to the frames."""
    segments = {same["producer"]: ArrayLayout(window.shape[1:], window.dtype)}
    publication: Publication = context.publish(
        context, call, same["name"], segments, {}, same["lag"]
    )
    undo.callback(publication.discard)
    return publication

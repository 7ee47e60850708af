"""Route ``host`` by the compiled part: makes the tables of a plan, and answers what C asks.

A call gives the addresses of its fields; nothing is bound to them, so that arrays which are new at
each call take no longer than others. What C does not know, it asks here: where a field lies that it
has not seen, and whether to go on waiting.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.coordination import recording
from mpishare.coordination.control_block import State
from mpishare.errors import ClosedError, PeerError, PeerTimeout
from mpishare.memory.memory import address_of
from mpishare.memory.numbers import added_in_c
from mpishare.plans.cells import Cells, Lowered, lower
from mpishare.plans.exchange.host.parts import RouteParts, lay_out
from mpishare.plans.exchange.host.process_read import PeerReads
from mpishare.plans.exchange.host.route import HostRoute
from mpishare.plans.exchange.host.staging import (
    CONSUMED,
    IN_PROCESS,
    READY,
    STAGED,
    Staging,
    table_offset,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.plans.engine import RoutedSetup
    from mpishare.plans.exchange.host.parts import RoutePart, Sender
    from mpishare.plans.exchange.host.route import Array
    from mpishare.plans.layout import FieldLayout
    from mpishare.plans.message import Message, Part
    from mpishare.plans.rings import Slide


class CompiledRoute(HostRoute):
    """The messages of one plan between ranks of a node. C keeps the fields from start to wait."""

    def __init__(self, setup: RoutedSetup) -> None:
        super().__init__(setup)
        self._context, self._layouts = setup.context, setup.layouts
        # Ghosts that are added are zeroed at once, and so never read where they are.
        # What is rounded on the way is not read as it is.
        self._peer_reads = PeerReads(setup, () if setup.adds or setup.wire else setup.sends)
        self._peers, self._call = self._peer_reads.peers, f"{setup.name}: exchange"
        self._staging = Staging(setup, self._peer_reads.keys)

    def lay_out(self, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        """Make the tables of C. The messages include those of this rank to itself."""
        setup, context, mine = self._setup, self._context, self._comm.rank
        module = context.compiled
        self._peer_reads.lay_out(recvs)
        parts = lay_out(setup, sends, recvs, self._staging)
        self._parts = parts
        self._receivers = sorted({message.peer for message in sends} - {mine})
        control = {rank: module.address_of(words) for rank, words in self._staging.control.items()}
        tables = (table_offset(parity, self._staging.nfields) for parity in (0, 1))
        # Of parts that slide: the words for C, and steps and ends of what is copied.
        self._slides: list[tuple[Slide, Array, list[int], tuple[int, int]]] = []
        self.exchange = module.Exchange(
            owner=self,
            context=context,
            agreement=context.agreement,
            life=context.life,
            recordings=recording.UNDER_WAY,
            array_type=np.ndarray,
            words=tuple(control[mine] + 8 * at for at in (READY, CONSUMED, *tables)),
            fields=tuple(map(self._lower_field, setup.mine, parts.in_place)),
            receivers=tuple(
                (control[rank] + 8 * CONSUMED, rank in parts.readers) for rank in self._receivers
            ),
            senders=tuple(self._lower_sender(each, control) for each in parts.senders),
            out=tuple(map(self._lower, parts.outgoing)),
            adds=setup.adds,
            is_reverse=setup.zeroes,
            is_rounded=setup.wire is not None,
            nbytes=sum(message.nbytes for message in (*sends, *recvs)),
            looks_per_yield=context.looks_per_yield,
        )
        self.staging_nbytes = self._staging.nbytes + self._peer_reads.nbytes
        if self._slides:
            setup.shifts.follow(self._slide)

    # --- the tables

    def _lower_field(self, layout: FieldLayout, in_place: bool) -> tuple[Any, ...]:
        name = added_in_c(self._context.compiled, layout.dtype)
        return layout.dtype, layout.shape, layout.strides, layout.span_nbytes, in_place, name

    def _lower_sender(self, sender: Sender, control: dict[int, int]) -> tuple[Any, ...]:
        block, rank = self._context.agreement.block, self._comm.ranks_here[sender.rank]
        parts, pid = tuple(map(self._lower, sender.parts)), self._peers.pids[sender.rank]
        return sender.rank, control[sender.rank], block.state_address(rank), pid, parts

    def _lower(self, part: RoutePart) -> tuple[Any, ...]:
        """Return both fields, the copy to or from both buffers, the copy in place, and the reads.

        What is sent in place goes to the same place of a field like it: see `PeerReads.shadow`.
        """
        name, mine = part.name, part.part
        is_sent, is_own = name.receiver != self._comm.rank, name.receiver == name.sender
        cells = Cells.of_key(self._setup.mine[mine.field], mine.key).turned(mine.turn)
        make = partial(self._lower_copy, mine, is_received=not is_sent)
        staged = even = odd = direct = None
        if part.buffers is not None:
            packed = Cells.of_array(part.buffers[0])
            both = (packed, cells) if is_sent else (cells, packed)
            staged = make(*both, by=cells, ends=(0, 1) if is_sent else (1, 0))
            even, odd = map(address_of, part.buffers)
        if part.in_place or is_own:
            source = cells
            if not is_sent:
                there = self._layouts[name.sender][name.field]
                source = Cells.of_key(there, part.source_key).turned(mine.far_turn)
            direct = make(cells, source, by=cells if is_own else source, ends=(1, 2))
        reads = self._peer_reads.reads.get(name, ())
        return mine.field, name.field, staged, even, odd, direct, tuple(reads)

    def _lower_copy(
        self,
        part: Part,
        to: Cells,
        source: Cells,
        *,
        by: Cells,
        ends: tuple[int, int],
        is_received: bool = False,
    ) -> Lowered:
        """Lower a copy of a part, from and to a packed one (0), this end (1) or the other (2)."""
        layout, slide = self._setup.mine[part.field], part.slide
        factors = part.factors.pack() if is_received and part.factors else None
        if slide is None:
            found = lower(to, source, layout.dtype.itemsize, by=by)
            return found if found is None or factors is None else (*found, 0, None, factors)
        to, source = (each._replace(shape=part.shape) for each in (to, source))
        found = lower(to, source, layout.dtype.itemsize, by=by, sliding=slide.axis)
        words = np.zeros(3, np.int64)
        steps = [cells.strides[slide.axis] for cells in (to, source)]
        self._slides.append((slide, words, steps, ends))
        return found and (*found, address_of(words), factors)

    def _slide(self, shifts: Sequence[int]) -> None:
        """Write how many cells of each part travel at a call, and how far from its first one."""
        for slide, words, steps, ends in self._slides:
            count, *first = slide.ends(shifts)
            places = (0, *first)
            words[:] = count, *(step * places[end] for step, end in zip(steps, ends, strict=True))

    # --- what C asks

    def locate(self, field: int, address: int) -> tuple[int, int, int, int]:
        """Return the words of a field's `Location`, and its shadow's address or 0."""
        nbytes = self._layouts[self._comm.rank][field].span_nbytes
        found = self._context.locate(address, nbytes)
        if found is not None:
            return *found, 0
        if field not in self._peer_reads.fields:
            return STAGED, 0, 0, 0
        shadow = self._peer_reads.shadow(field, address)
        if shadow is None:
            return IN_PROCESS, 0, address, 0
        return IN_PROCESS, 0, address_of(shadow), address_of(shadow)

    def segment_of(self, sender: int, window: int, segment: int) -> int:
        address = self._context.segment_address(window, segment)
        if address is None:
            raise ClosedError(
                f"{self._setup.name}: exchange failed: window {window}, in which rank {sender} has "
                "its field, is closed"
            )
        return address

    def wait_for_senders(self, _: int, epoch: int) -> None:
        """Wait until all senders have published an epoch, as all long waits do."""
        ranks = [sender.rank for sender in self._parts.senders]
        try:
            self._staging.wait_until(ranks, READY, epoch)
        except (PeerError, PeerTimeout) as error:
            # A call that a rank has left out shows only here, perhaps many calls later.
            calls = ((rank, self._staging.control[rank][READY]) for rank in ranks)
            behind = [f"rank {rank} has made {count}" for rank, count in calls if count < epoch]
            error.add_note(f"It is call {epoch} of this plan: {', '.join(behind)}.")
            raise

    def wait_for_receivers(self, _: int, epoch: int) -> None:
        self._staging.wait_until(self._receivers, CONSUMED, epoch - 2)

    def wait_for_readers(self, _: int, epoch: int) -> None:
        self._staging.wait_until(self._parts.readers, CONSUMED, epoch)

    def require_here(self, sender: int, _: int) -> None:
        """Raise if a rank whose field was read where it is has left."""
        self._context.memory_barrier()
        if self._context.agreement.block.state(self._comm.ranks_here[sender]) != State.PRESENT:
            self._staging.wait_for(lambda: [sender])  # raises, with the reason

    def refuse_read(self, sender: int, error: int) -> None:
        self._peers.require_read(self._call, sender, error)

    # --- an exchange

    def start(self, arrays: Sequence[Array]) -> None:
        """Pack my cells, or publish where they are; waits only for a rank two epochs behind."""
        self.exchange.start(arrays)

    def wait(self, arrays: Sequence[Array]) -> None:  # noqa: ARG002  C has their addresses
        """Copy or add the cells of all senders, then wait until nobody reads my fields any more."""
        self.exchange.wait()

    def close(self) -> None:
        if hasattr(self, "exchange"):
            self.exchange.close()
        self._parts = RouteParts([], [], [], [])  # views of the memory
        self._peer_reads.close()
        self._staging.close()

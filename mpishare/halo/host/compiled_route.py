"""Route ``host`` by the compiled part: the same protocol in the same memory, made in C.

A call gives the addresses of its fields; nothing is bound to them, so that arrays which are new at
each call take no longer than others. What C does not know, it asks here: where a field lies that it
has not seen, and whether to go on waiting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.coordination import recording
from mpishare.halo.host.lowering import cells_in, cells_of, lower
from mpishare.halo.host.shared import BoundCall, HostRoute
from mpishare.halo.host.staging import CONSUMED, READY
from mpishare.plans.layout import address_of, array_at

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.halo.host.copies import Array, SelfCopy
    from mpishare.halo.host.lowering import Lowered
    from mpishare.halo.host.parts import Incoming, Outgoing, Sender
    from mpishare.plans.engine import RoutedSetup
    from mpishare.plans.layout import FieldLayout
    from mpishare.plans.message import Message


class AddressedCall(BoundCall):
    """A call whose fields Python has checked, and their addresses."""

    __slots__ = ("addresses",)

    def __init__(
        self, windows_version: int, arrays: list[Array], addresses: tuple[int, ...]
    ) -> None:
        super().__init__(windows_version, arrays)
        self.addresses = addresses


class CompiledRoute(HostRoute):
    """`HostRoute` of an exchange that is not reversed, where there is a compiled part."""

    def lay_out(
        self,
        setup: RoutedSetup,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        *,
        is_reverse: bool,
    ) -> None:
        """Find out where the cells come from and where they go, and make the tables of it."""
        super().lay_out(setup, sends, recvs, is_reverse=is_reverse)
        module, context, parts = self._context.compiled, self._context, self._parts
        mine, layouts = self._comm.rank, setup.mine
        control = {rank: module.address_of(words) for rank, words in self._staging.control.items()}
        ready = control[mine]
        words = ready + 8 * READY, ready + 8 * CONSUMED, *(ready + 8 * at for at in self._tables)
        own = [
            (copy.field, None, None, None, _lower_within(layouts[copy.field], copy), ())
            for copy in parts.self_copies
        ]
        self._exchange = module.Exchange(
            owner=self,
            context=context,
            agreement=context.agreement,
            recordings=recording.UNDER_WAY,
            array_type=np.ndarray,
            words=words,
            fields=tuple(
                (each.dtype, each.shape, each.strides, each.span_nbytes, in_place)
                for each, in_place in zip(layouts, parts.in_place, strict=True)
            ),
            receivers=tuple(
                (control[rank] + 8 * CONSUMED, rank in parts.readers) for rank in self._receivers
            ),
            senders=tuple(self._lower_sender(each, control) for each in parts.senders),
            out=tuple(map(self._lower_outgoing, parts.outgoing)),
            own=tuple(each for each in own if each[4] is not None),
            nbytes=sum(message.nbytes for message in (*sends, *recvs)),
            looks_per_yield=context.looks_per_yield,
        )
        self.try_exchange: Callable[[Sequence[Any]], bool] = self._exchange.try_exchange
        self.try_start: Callable[[Sequence[Any]], bool] = self._exchange.try_start
        self.try_wait: Callable[[], bool] = self._exchange.try_wait

    # --- the tables

    def _lower_outgoing(self, part: Outgoing) -> tuple[Any, ...]:
        layout = self._layouts[self._comm.rank][part.field]
        cells, itemsize = cells_of(layout, part.key), layout.dtype.itemsize
        buffers: Sequence[Any] = (None, None)
        staged = within = None
        if part.buffers is not None:
            staged = lower(cells_in(part.buffers[0]), cells, itemsize, by=cells)
            buffers = tuple(map(address_of, part.buffers))
        if part.in_place:
            within = lower(cells, cells, itemsize, by=cells)
        return (part.field, staged, *buffers, within, ())

    def _lower_sender(self, sender: Sender, control: dict[int, int]) -> tuple[Any, ...]:
        parts = tuple(self._lower_incoming(sender, part) for part in sender.parts)
        block, rank = self._context.agreement.block, self._comm.ranks_here[sender.rank]
        pid = self._peer_reads.pid(sender.rank)
        alive = block.state_address(rank), block.lock_of(rank)
        return sender.rank, control[sender.rank], *alive, pid, parts

    def _lower_incoming(self, sender: Sender, part: Incoming) -> tuple[Any, ...]:
        field = part.name.field
        layout = self._layouts[self._comm.rank][field]
        cells, itemsize = cells_of(layout, part.key), layout.dtype.itemsize
        buffers: Sequence[Any] = (None, None)
        staged = direct = None
        reads: tuple[Any, ...] = ()
        if part.buffers is not None:
            staged = lower(cells, cells_in(part.buffers[0]), itemsize, by=cells)
            buffers = tuple(map(address_of, part.buffers))
        else:
            found = self._peer_reads.reads(part.name)
            reads = tuple(self._lower_read(layout, each) for each in found)
        if part.in_place:
            source = cells_of(self._layouts[sender.rank][field], part.source_key)
            direct = lower(cells, source, itemsize, by=source)
        return (field, staged, *buffers, direct, reads)

    def _lower_read(self, layout: FieldLayout, read: Any) -> tuple[Any, ...]:
        nbytes = read.read.nbytes
        if read.cells is None:
            return read.offset, nbytes, read.target, None, None
        cells, itemsize = cells_of(layout, read.key), layout.dtype.itemsize
        copy = lower(cells, cells_in(read.cells), itemsize, by=cells)
        return read.offset, nbytes, 0, address_of(read.cells), copy

    # --- what C asks

    def locate(self, field: int, address: int) -> tuple[int, int, int, int]:
        """Return the words of a field's `FieldAddress`, and its shadow's address or 0."""
        entry, shadow = self._place_of(field, address)
        return *entry, 0 if shadow is None else address_of(shadow)

    def wait_for_senders(self, _: int, epoch: int) -> None:
        """Wait until all senders have published an epoch, as all long waits do."""
        self._wait_until([sender.rank for sender in self._parts.senders], READY, epoch)

    def wait_for_receivers(self, _: int, epoch: int) -> None:
        """Wait until no receiver is two epochs behind."""
        self._wait_until(self._receivers, CONSUMED, epoch - 2)

    def wait_for_readers(self, _: int, epoch: int) -> None:
        """Wait until nobody reads my fields any more."""
        self._wait_until(self._parts.readers, CONSUMED, epoch)

    def require_here(self, sender: int, is_read: int) -> None:
        """Raise if a rank whose field was read where it is has left, or its process has ended."""
        if is_read:
            self._peer_reads.check(sender, 0)
        self._require_present(sender)

    def refuse_read(self, sender: int, error: int) -> None:
        """Raise since cells of another process could not be read."""
        self._peer_reads.check(sender, error)

    # --- an exchange

    def ahead(self) -> list[int]:
        """Ranks of the node that have started more exchanges than this one."""
        self._epoch = self._exchange.epoch
        return super().ahead()

    def bind(self, addresses: tuple[int, ...]) -> AddressedCall:
        """Return a call with fields at these addresses, which Python has checked."""
        arrays = list(map(array_at, addresses, self._layouts[self._comm.rank]))
        return AddressedCall(self._context.windows_version, arrays, addresses)

    def start(self, call: Any) -> None:
        """Pack my cells, or publish where they are; waits only for a rank two epochs behind."""
        self._exchange.start(call.addresses)

    def wait(self, call: Any) -> None:  # noqa: ARG002  C has the addresses
        """Copy the cells of all senders, then wait until nobody reads my fields any more."""
        self._exchange.wait()

    def close(self) -> None:
        """Unmap the shared memory."""
        if hasattr(self, "_exchange"):
            self._exchange.close()
        super().close()


def _lower_within(layout: FieldLayout, copy: SelfCopy) -> Lowered | None:
    to, source = cells_of(layout, copy.key), cells_of(layout, copy.source_key)
    return lower(to, source, layout.dtype.itemsize, by=to)

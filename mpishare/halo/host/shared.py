"""Route ``host``: receivers copy the cells out of shared memory, or out of the sender's process.

In each epoch a sender publishes where its fields are, then that they are ready (`READY`); each
receiver copies its parts and counts them as consumed (`CONSUMED`). A field in a window of the node
is read in place, with a single copy; so are large faces of other fields, by `PeerReads`. The rest
is packed into a staging buffer in shared memory. Double buffering lets a sender run two epochs
ahead before it waits for a slow receiver. Fields that are read in place may be overwritten after
`wait`, which therefore waits for all of their readers.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mpishare.coordination.control_block import State
from mpishare.errors import ClosedError
from mpishare.halo.host.copies import WHOLE, add, bind_copy, bind_copy_within, put
from mpishare.halo.host.parts import RouteParts, lay_out
from mpishare.halo.host.process_read import PeerReads
from mpishare.halo.host.staging import (
    CONSUMED,
    IN_PROCESS,
    IN_STAGING,
    ONCE,
    READY,
    DoubleBuffer,
    FieldAddress,
    read_entry,
    set_entry,
    table_offset,
    write_table,
)
from mpishare.plans.layout import address_of, array_at
from mpishare.windows.counter_ops import spin_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.halo.host.copies import Array, Copy
    from mpishare.halo.host.parts import Incoming, Sender
    from mpishare.plans.engine import RoutedSetup
    from mpishare.plans.message import Message

_MAX_CACHED = 64  # per call and sender, the addresses at which it was read
_MAX_CALLS = 256


class BoundCall:
    """The copies of a call, bound to the addresses of its fields. Does not hold their memory.

    Or one that is made once (`HostRoute.unbound`): it holds the fields, and what can be copied by
    the keys of the plan's parts is not bound.

    Attributes
    ----------
    windows_version : int
        The version of the node's windows for which it was made.
    arrays : list of numpy.ndarray
        The fields.
    table_version : int
        The version of `table`; 0 if all fields are staged.
    table : list of int
        The words of the `FieldAddress` of each field.
    packs : pair of list of Copy, or None
        Into the staging buffers, in even and in odd epochs; None if they are not bound.
    self_copies : list of Copy
        Within the fields of this rank.
    receives : dict
        For a sender, a parity and the version of the sender's table, the copies out of its fields.
    """

    __slots__ = (
        "arrays", "packs", "receives", "self_copies", "table", "table_version", "windows_version",
    )  # fmt: skip

    def __init__(self, windows_version: int, arrays: list[Array]) -> None:
        self.windows_version = windows_version
        self.arrays = arrays
        self.table_version = 0
        self.table: list[int] = []
        self.packs: tuple[list[Copy], list[Copy]] | None = None
        self.self_copies: list[Copy] = []
        self.receives: dict[tuple[Sender, int, int], list[Copy]] = {}


class HostRoute:
    """The messages of one plan between ranks of a node. Collective, host-blocking.

    It is whole after `lay_out`, which may fail on one rank.

    Parameters
    ----------
    setup : RoutedSetup
        The plan's.
    sends : sequence of Message
        What takes this route, the messages of this rank to itself included.
    is_reverse : bool
        Whether received cells are added. Then no field is read in place.
    """

    def __init__(
        self,
        setup: RoutedSetup,
        sends: Sequence[Message],
        *,
        is_reverse: bool,
    ) -> None:
        comm = setup.comm
        self._comm = comm
        self._call = f"{setup.name}: {setup.call_name(is_reverse=is_reverse)}"
        self._context = comm.context
        self._layouts = setup.layouts
        self._store = add if is_reverse else put
        self._memory_barrier = comm.context.memory_barrier
        self._spins_per_yield = comm.context.spins_per_yield
        self._epoch = 0
        self._calls: dict[tuple[int, ...], BoundCall] = {}
        self._table_version = 0
        self._tables = table_offset(0, len(setup.mine)), table_offset(1, len(setup.mine))
        messages = setup.messages_by_rank(is_reverse=is_reverse)
        self._peer_reads = PeerReads(setup, () if is_reverse else messages)
        self._staging = DoubleBuffer(setup, messages, self._peer_reads.keys)
        self._control = self._staging.control[comm.rank]
        self._receivers = sorted({message.peer for message in sends} - {comm.rank})
        self._receiver_control = [self._staging.control[rank] for rank in self._receivers]
        self._parts = RouteParts([], ([], []), [], [], [], [])

    def lay_out(
        self,
        setup: RoutedSetup,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        *,
        is_reverse: bool,
    ) -> None:
        """Find out where the cells come from and where they go. Local; the end of making it."""
        self._peer_reads.lay_out(recvs)
        self._parts = lay_out(setup, sends, recvs, self._staging, is_reverse=is_reverse)
        self._read_in_place = [n for n, is_read in enumerate(self._parts.in_place) if is_read]
        self._all_staged = [*IN_STAGING] * len(setup.mine)
        self._carriers = [None if each.is_plain else each.carrier for each in setup.mine]

    @property
    def staging_nbytes(self) -> int:
        """Bytes of staging memory."""
        return self._staging.nbytes + self._peer_reads.nbytes

    # --- binding a call to the addresses of its fields

    def bind(self, addresses: tuple[int, ...]) -> BoundCall:
        """Return the copies of a call with fields at these addresses.

        They are cached until a window is opened or closed.
        """
        version = self._context.windows_version
        call = self._calls.get(addresses)
        if call is not None and call.windows_version == version:
            return call
        layouts = self._layouts[self._comm.rank]
        call = BoundCall(version, list(map(array_at, addresses, layouts)))
        call.packs = [], []
        for field, address in enumerate(addresses):
            self._bind_sends(call, field, address, call.packs)
        if any(call.table):
            self._table_version += 1
            call.table_version = self._table_version
        self._bind_self_copies(call)
        if len(self._calls) >= _MAX_CALLS:
            del self._calls[next(iter(self._calls))]  # the oldest
        self._calls[addresses] = call
        return call

    def unbound(self, fields: Sequence[Array]) -> BoundCall | None:
        """Return a call that packs these arrays without binding; None if that is not enough.

        It is not enough where they lie in windows: other ranks read large faces in place there.
        """
        context, read = self._context, self._peer_reads.fields
        table = self._all_staged[:] if read else self._all_staged
        for field in self._read_in_place:
            address, layout = address_of(fields[field]), self._layouts[self._comm.rank][field]
            if context.locate(address, layout.span_nbytes) is not None:
                return None
            if field in read:
                if not self._peer_reads.is_readable(field, address):
                    return None
                set_entry(table, field, FieldAddress(IN_PROCESS, 0, address))
        arrays = [
            array if carrier is None else array.view(carrier)
            for array, carrier in zip(fields, self._carriers, strict=True)
        ]
        call = BoundCall(context.windows_version, arrays)
        call.table = table
        if read:
            self._table_version += 1
            call.table_version = self._table_version | ONCE
        if self._parts.self_copies:
            self._bind_self_copies(call)
        return call

    def _bind_self_copies(self, call: BoundCall) -> None:
        call.self_copies = [
            copy
            for field, key, source_key in self._parts.self_copies
            for copy in bind_copy_within(call.arrays[field], key, source_key)
        ]

    def _bind_sends(
        self, call: BoundCall, field: int, address: int, packs_of: tuple[list[Copy], list[Copy]]
    ) -> None:
        """Find out where other ranks read a field, and bind what is packed before that."""
        array = call.arrays[field]
        entry, shadow = self._place_of(field, address)
        call.table += entry
        for part in self._parts.outgoing:
            if part.field != field or (part.in_place and entry.is_in_window):
                continue
            for parity, packs in enumerate(packs_of):
                if part.buffers is not None:
                    buffer = part.buffers[parity]
                    packs.append(bind_copy(put, buffer, WHOLE, array, part.key))
                elif shadow is not None:
                    packs.append(bind_copy(put, shadow, part.key, array, part.key))

    def _place_of(self, field: int, address: int) -> tuple[FieldAddress, Array | None]:
        """Return where other ranks read a field, and its shadow, if they read that instead."""
        if self._parts.in_place[field]:
            nbytes = self._layouts[self._comm.rank][field].span_nbytes
            found = self._context.locate(address, nbytes)
            if found is not None:
                return FieldAddress(*found), None
        if field not in self._peer_reads.fields:
            return IN_STAGING, None
        shadow = self._peer_reads.shadow(field, address)
        offset = address if shadow is None else address_of(shadow)
        return FieldAddress(IN_PROCESS, 0, offset), shadow

    def segment_of(self, sender: int, window: int, segment: int) -> int:
        """Return where a segment of a window is mapped here."""
        address = self._context.segment_address(window, segment)
        if address is None:
            raise ClosedError(
                f"{self._call} failed: window {window}, in which rank {sender} has its field, is "
                "closed"
            )
        return address

    def _bind_receives(self, call: BoundCall, sender: Sender, parity: int) -> list[Copy]:
        """Return the copies out of a sender's fields, at the addresses that it has published."""
        copies = [
            copy for part in sender.parts for copy in self._bind_part(call, sender, part, parity)
        ]
        if len(call.receives) >= _MAX_CACHED * len(self._parts.senders):
            call.receives.clear()
        call.receives[sender, parity, sender.control[self._tables[parity]]] = copies
        return copies

    def _bind_part(
        self, call: BoundCall, sender: Sender, part: Incoming, parity: int
    ) -> list[Copy]:
        """Return the copies of one part: from my field, a process, a staging buffer or a window."""
        field, key = part.name.field, part.key
        target = call.arrays[field]
        if sender.rank == self._comm.rank:
            return [bind_copy(self._store, target, key, target, part.source_key)]
        entry = read_entry(sender.control, self._tables[parity], field)
        if part.in_place and entry.is_in_window:
            address = self.segment_of(sender.rank, entry.window, entry.segment) + entry.offset
            source = array_at(address, self._layouts[sender.rank][field])
            return [bind_copy(self._store, target, key, source, part.source_key)]
        if part.buffers is None:
            return [partial(self._peer_reads.read, part.name, entry.offset, target)]
        return [bind_copy(self._store, target, key, part.buffers[parity], WHOLE)]

    # --- an exchange

    def ahead(self) -> list[int]:
        """Ranks of the node that have started more exchanges than this one."""
        self._memory_barrier()
        control, ranks_here = self._staging.control, self._comm.ranks_here
        return [ranks_here[rank] for rank in control if control[rank][READY] > self._epoch]

    def start(self, call: BoundCall) -> None:
        """Pack my cells, or publish where they are; waits only for a rank two epochs behind."""
        epoch, control = self._epoch + 1, self._control
        for theirs in self._receiver_control:
            if theirs[CONSUMED] < epoch - 2:
                self._wait_until(self._receivers, CONSUMED, epoch - 2)
        self._memory_barrier()
        parity = epoch & 1
        if call.packs is None:
            for field, key, buffer in self._parts.staged[parity]:
                buffer[...] = call.arrays[field][key]
        else:
            for copy in call.packs[parity]:
                copy()
        table = self._tables[parity]
        if control[table] != call.table_version:
            write_table(control, table, call.table_version, call.table)
        self._publish(epoch)
        self._epoch = epoch

    def wait(self, call: BoundCall) -> None:
        """Copy the cells of all senders, then wait until nobody reads my fields any more."""
        epoch, receives = self._epoch, call.receives
        parity = epoch & 1
        table = self._tables[parity]
        for copy in call.self_copies:
            copy()
        if call.windows_version != self._context.windows_version:
            receives.clear()  # to raise if one of them was in a window that is closed now
        for sender in self._parts.senders:
            control = sender.control
            if control[READY] < epoch:
                self._wait_until((sender.rank,), READY, epoch)
            self._memory_barrier()
            version = control[table]
            copies = receives.get((sender, parity, version))
            if copies is not None:
                for copy in copies:
                    copy()
            elif sender.rank != self._comm.rank and (
                version & ONCE or (call.packs is None and not version)
            ):
                for field, key, buffer in sender.staged[parity]:
                    self._store(call.arrays[field], key, buffer)
                for part in sender.read:
                    field = part.name.field
                    address = read_entry(control, table, field).offset
                    self._peer_reads.read(part.name, address, call.arrays[field])
            else:
                for copy in self._bind_receives(call, sender, parity):
                    copy()
            if version:
                self._require_present(sender.rank)
        self._memory_barrier()
        self._control[CONSUMED] = epoch
        if call.table_version:
            self._wait_until(self._parts.readers, CONSUMED, epoch)
            self._memory_barrier()

    def close(self) -> None:
        """Unmap the shared memory."""
        self._control, self._receiver_control = memoryview(b"").cast("Q"), []
        self._parts = RouteParts([], ([], []), [], [], [], [])
        self._calls.clear()
        self._peer_reads.close()
        self._staging.close()

    def _publish(self, epoch: int) -> None:
        self._memory_barrier()
        self._control[READY] = epoch

    def _wait_until(self, ranks: Sequence[int], word: int, epoch: int) -> None:
        """Wait until a control word of each rank has reached an epoch."""
        control = self._staging.control
        for rank in ranks:
            theirs = control[rank]
            if theirs[word] < epoch and not spin_until(theirs, word, epoch, self._spins_per_yield):
                self._comm.wait(
                    self._call, lambda: [each for each in ranks if control[each][word] < epoch]
                )

    def _require_present(self, peer: int) -> None:
        """Raise if a rank whose field was read in place has left: the cells may be overwritten."""
        self._memory_barrier()
        if self._context.agreement.state(self._comm.ranks_here[peer]) != State.PRESENT:
            self._comm.wait(self._call, lambda: [peer])  # raises, with the reason

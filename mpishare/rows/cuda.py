"""The engine for columns in GPU memory: one kernel packs and signals, one waits and unpacks."""

from __future__ import annotations

import ctypes
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

import cupy
import numpy as np

from mpishare.backends import driver
from mpishare.backends.cuda_streams import borrowed, on_stream
from mpishare.coordination import recording
from mpishare.errors import CapacityError, UnsupportedError, name_ranks
from mpishare.plans.gpu.fields import place_of
from mpishare.plans.gpu.flags import Host
from mpishare.plans.gpu.launch import PlanLauncher, kernel
from mpishare.plans.gpu.plan_engine import CudaPlanEngine
from mpishare.plans.layout import require_number
from mpishare.rows import records
from mpishare.rows.calls import int_of, require_count, require_like, require_numbers
from mpishare.rows.cuda_messages import CudaMessages
from mpishare.rows.cuda_slots import CudaSlots, fits, words_of
from mpishare.rows.messages import guarded
from mpishare.runtime.route import FUSED, GPU_MESSAGES, MESSAGES, NCCL

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mpishare.backends import StreamInfo
    from mpishare.plans.engine import RoutedSetup
    from mpishare.rows.calls import Span
    from mpishare.rows.form import Form

_SOURCE = Path(__file__).with_name("rows.cu")
_ROWS_OF_TILE = 32
_MAX_SEEN = 256


class CudaRows(CudaPlanEngine):
    """The rows of one plan in GPU memory. Collective to make, host-blocking."""

    _has_stream_waits = False

    def __init__(self, setup: RoutedSetup, form: Form) -> None:
        super().__init__(setup, setup.chain)
        self.form, self.rank, self.size = form, setup.comm.rank, setup.comm.size
        _require_routes(setup)
        _require_size(setup.name, form)
        where = f"{setup.name}, rank {self.rank} of {self.size}"
        self.launcher = PlanLauncher(setup.context, where)
        self._offsets = form.offsets(form.room)
        routes, self._host_routes, self.busy = setup.my_routes, setup.host_routes, setup.busy
        far = {at for at, key in enumerate(form.keys) if routes[key.rank] is MESSAGES}
        self.slots = self._buffers = CudaSlots(setup, form, far)
        self._messages = CudaMessages(setup.comm, form, self.slots, far)
        self.migration: Any = None
        self.lanes, self.placed = records.Lanes(), records.Lanes()
        self._spans, self._nrows = records.Spans(), ctypes.c_int64(0)
        self._sent_keys = ctypes.c_uint32(records.ALL_KEYS)
        self._take = _TakeArguments()
        self._held: list[Any] = []  # memory of migrations
        self._launches: dict[Any, driver.Launch] = {}
        self._seen: dict[Any, Any] = {}  # arrays by their ids, which may be reused
        self._is_open = self._has_come = False
        self._epoch, self._traded = 0, 0  # calls begun; the last one whose messages have come
        self._counted: Any = None  # results of the call that is open, once the host has them
        self._sent_on: Any = None  # the stream and the rows of the last start
        self._make(self._build)
        self._join_order()

    def _build(self) -> None:
        """Map the slots of the peers, and load the kernels."""
        self._buffers.attach(0)
        launcher = self.launcher
        self.slots.fill()
        self._messages.make_slots()
        sizes = self.slots.sizes(launcher)
        device = launcher.zeros(records.DEVICE_NBYTES)
        results = launcher.zeros(8 * records.RESULTS)
        self.results = view(results, (records.RESULTS,), np.dtype(np.int64), launcher)
        first = next(iter(self._comm.ranks_here))
        host = Host(self._flags.stalled_on(first), self._flags.abort)
        self.ends = [device, results]  # of the arguments of all kernels
        self.sizes, take = sizes, self._take
        self._send_arguments = [
            *(sizes, self.lanes, self._spans, self._nrows, self._sent_keys, *self.ends)
        ]
        self._take_arguments = [
            *(sizes, self.placed, take.first, take.last, take.kind, take.given, take.capacity),
            *(take.result, take.goals, self.rank, *self.ends, host),
        ]
        for name in ("send_rows", "take_rows", "migrate_rows"):
            kernel(_SOURCE, name, (), self._device)
        launcher.load(0)
        self._context.drain(self.name)

    def launch(self, name: str, blocks: int, arguments: Sequence[Any]) -> driver.Launch:
        """Return the launch of a kernel, whose arguments are read when it is enqueued."""
        blocks = 1 << max(0, blocks - 1).bit_length()
        blocks = min(blocks, self.launcher.max_blocks)
        found = self._launches.get((name, blocks))
        if found is None:
            function = kernel(_SOURCE, name, (), self._device)
            found = self._launches[name, blocks] = driver.Launch(
                function, blocks, records.THREADS, arguments, self.launcher.where
            )
        return found

    def blocks_for(self, rows: int) -> int:
        """Return the blocks with which each warp moves a word of some rows."""
        tiles = -(-rows // _ROWS_OF_TILE) * self.lanes.count
        return max(1, -(-int(tiles) // records.WARPS))

    # --- checks

    def set_lanes(self, lanes: records.Lanes, columns: Sequence[Any]) -> int:
        """Let the kernels use these columns; return the rows of the shortest."""
        described, rows = self._known("columns", columns, self._describe)
        lanes.copy(described)
        return int(rows)

    def _known(
        self, name: str, arrays: Sequence[Any], describe: Callable[[Sequence[Any]], Any]
    ) -> Any:
        """Return what `describe` says of arrays used by this name, or said at an earlier call."""
        key = (name, *map(id, arrays))
        seen = self._seen.get(key)
        if seen is None or any(
            each() is not array or shape != array.shape
            for (each, shape), array in zip(seen[0], arrays, strict=True)
        ):
            if len(self._seen) >= _MAX_SEEN:
                self._seen.clear()
            described = describe(arrays)
            seen = self._seen[key] = [(ref(each), each.shape) for each in arrays], described
        return seen[1]

    def _describe(self, columns: Sequence[Any]) -> tuple[records.Lanes, int]:
        """Return the words of columns, and the rows of the shortest."""
        form = self.form
        require_number(columns, len(form.columns))
        lanes, at = records.Lanes(), 0
        for number, (given, column) in enumerate(zip(columns, form.columns, strict=True)):
            address, layout = place_of(given, f"column {number}")
            require_like(layout, column, number, is_contiguous=layout.is_packed("C"))
            if layout.device != self._device:
                raise ValueError(
                    f"column {number} is on GPU {layout.device} instead of {self._device}"
                )
            word = records.word_of(column.nbytes, address)
            for begin in range(0, column.nbytes, word):
                if at == records.MAX_LANES:
                    raise ValueError(
                        f"rows have more than {at} words, as column {number} begins at {address:#x}"
                    )
                slot = self._offsets[number]
                lanes.of[at] = records.Lane(address, slot, begin, column.nbytes, word)
                at += 1
        lanes.count = at
        return lanes, min(column.shape[0] for column in columns)

    def look_at(self, array: Any, name: str) -> tuple[int, int, int]:
        """Return the address of an array of ints along one axis, its length, and bytes of each."""

        def describe(arrays: Sequence[Any]) -> tuple[int, int, int]:
            address, layout = place_of(arrays[0], name)
            require_numbers(layout, name)
            if not layout.is_packed("C"):
                raise ValueError(f"{name} are not contiguous: give a copy")
            return address, layout.shape[0], layout.dtype.itemsize

        address, length, nbytes = self._known(name, [array], describe)
        return address, length, nbytes

    # --- calls

    def begin(self, entered: StreamInfo) -> None:
        """Let a call that sends come after the last one; a captured one grows no slots."""
        self._follow(entered)
        if not entered[3]:
            self.slots.grow()
            if self.migration is not None:
                self.migration.keep(entered)
            self.staging_nbytes = self.slots.nbytes
            if self.slots.is_changed:
                self.slots.publish(entered[0])

    def start(self, columns: list[Any], spans: Sequence[Span | None], stream: Any) -> None:
        rows = self.set_lanes(self.lanes, columns)
        if any(column.shape[0] != rows for column in columns):
            raise ValueError(f"columns have {[column.shape[0] for column in columns]} rows")
        rooms = self.slots.rooms
        count = sum(
            self._set_span(self._spans.of[place], span, rows, rooms[place])
            for place, span in enumerate(spans)
        )
        entered = self._enter("start", columns, stream)
        self._nrows.value = rows
        self.begin(entered)
        self._send(entered, count)
        self.begin_epoch(entered, spans)

    def _send(self, entered: StreamInfo, rows: int, keys: int = records.ALL_KEYS) -> None:
        self._sent_keys.value = keys
        launch = self.launch("send_rows", self.blocks_for(rows), self._send_arguments)
        launch.enqueue(entered[0])

    def begin_epoch(self, entered: StreamInfo, held: Any = None) -> None:
        """Note that rows were sent; the kernel that waits may read what is `held`."""
        self._flags.calls[0] += 1
        self._epoch += 1
        self._is_open, self._has_come, self._sent_on = True, False, (entered, held)
        self._counted = None
        self._leave(entered)

    def _receive_messages(self, entered: StreamInfo) -> None:
        """Trade messages with other nodes, once in a call. Host-blocking."""
        if not self._messages or self._traded == self._epoch:
            return
        self._traded = self._epoch

        def again(keys: int) -> None:
            self._send(entered, self._nrows.value, keys)

        def trade() -> None:
            self._messages.trade(f"{self.name}: wait", self._epoch, entered[0], again)

        guarded(self, "wait", trade)

    def fail(self, call: str, error: BaseException) -> None:
        """Leave the node: the others may have had this call's rows, or wait for them."""
        if self.agreement.failure is None:
            self.agreement.leave(f"{self.name}: {call}", error)

    def _gather(self, entered: StreamInfo) -> bool:
        """Take all rows into slots that have room, where `counts` saw more.

        Return whether the host knows that no rows travel in rounds.
        """
        found, is_over = self._counted, self._counted is not None
        for place, room in enumerate(self.slots.rooms if is_over else ()):
            is_over &= bool(found[records.SENT + place] <= room)
            count = int(found[records.CAME + place])
            if count <= found[records.SCALES + place] * self.form.room:
                continue
            is_over, epoch = False, int(found[records.EPOCH])
            self.slots.enlarge(place, count, is_needed=True)
            rows, scale = self.slots.slot_at(place, epoch), self.slots.scales[place]
            self.placed.copy(self.lanes)
            columns = self.slots.columns_at(rows, scale)
            for lane in self.placed.of[: self.placed.count]:
                lane.column = columns[self._offsets.index(lane.slot)]
            self.take(entered, place, place + 1, count, kind=records.ROUNDS)
            words = np.array([rows, scale], np.uint64)
            header = self.slots.header_at(place, epoch)
            self.slots.upload(header + 8 * records.ROWS, words, entered[0])
        return is_over

    def _set_span(self, to: Any, span: Span | None, rows: int, room: int) -> int:
        """Store the rows for a key; return how many go at once at most."""
        low, high, numbers = (0, 0, None) if span is None else span
        to.numbers, to.most = 0, rows
        if numbers is not None:
            to.numbers, to.most, to.nbytes = self.look_at(numbers, "row numbers")
            high = to.most if high is None else high
        first = 0 if _is_on_gpu(low) else int_of(low, "low")
        last = to.most if _is_on_gpu(high) else int_of(high, "high" if numbers is None else "n")
        if not 0 <= first <= last <= to.most:
            raise ValueError(f"rows {first} to {last} of {to.most}")
        records.set_bound(to.low, low)
        records.set_bound(to.high, high)
        return min(last - first, room)

    def place(self, into: Mapping[int, list[Any]], stream: Any) -> None:
        found = [
            (at, *self._known("columns", arrays, self._describe)) for at, arrays in into.items()
        ]
        entered = self._enter("wait", [each for arrays in into.values() for each in arrays], stream)
        self._follow(entered)
        is_over = self._gather(entered)
        for at, (place, lanes, rows) in enumerate(found, start=1):
            self.placed.copy(lanes)
            kind = records.LAST_ROUNDS if at == len(found) else records.ROUNDS
            self.take(entered, place, place + 1, rows, kind=kind)
        if not (found or is_over):
            self.take(entered, 0, 0, 0, kind=records.LAST_ROUNDS)
        self.end(entered)

    def append(self, columns: list[Any], count: Any, stream: Any) -> Any:
        lanes, capacity = self._known("columns", columns, self._describe)
        entered = self._enter("wait", columns, stream)
        result = self.new_count(count, entered)
        self._follow(entered)
        self._gather(entered)
        self.placed.copy(lanes)
        keys, kind = len(self.form.keys), records.LAST_ROUNDS
        self.take(entered, 0, keys, capacity, count, result, kind=kind)
        self.end(entered)
        return result

    def end(self, entered: StreamInfo) -> None:
        """Note that all rows have come."""
        self._is_open = False
        self._leave(entered)

    def new_count(self, count: Any, entered: StreamInfo) -> Any:
        """Return the array for the new count, given the old one; raise for one that is none."""
        if _is_on_gpu(count):
            require_count(count)
            return count
        if int_of(count, "count") < 0:
            raise ValueError(f"count is {count}")
        if entered[3]:
            raise UnsupportedError(
                f"{self.name}: count is an int, and the stream is being captured into a graph: "
                "replays would write into a result that may be gone by then. Give an array"
            )
        with on_stream(borrowed(entered[0])):
            return cupy.empty((), np.int64)

    def take(
        self,
        entered: StreamInfo,
        first: int,
        last: int,
        capacity: int,
        count: Any = 0,
        result: Any = None,
        goals: int = 0,
        kind: int = records.NO_ROUNDS,
    ) -> None:
        """Let the stream append the rows of some keys to the columns that are placed.

        `goals` is the address of those of a migration.
        """
        self._receive_messages(entered)
        take = self._take
        records.set_bound(take.given, count)
        take.first.value, take.last.value, take.capacity.value = first, last, capacity
        take.result.value = 0 if result is None else result.data.ptr
        take.goals.value, take.kind.value = goals, kind
        blocks = self.blocks_for(self.form.room * sum(self.slots.scales[first:last]))
        launch = self.launch("take_rows", blocks, self._take_arguments)
        self._in_order(lambda: launch.enqueue(entered[0]), entered)
        self._has_come = True

    # --- what came

    def look(self, call: str) -> np.ndarray[Any, Any]:
        """Return all results, once the stream has them."""
        if recording.current() is not None:
            raise UnsupportedError(
                f"{self.name}: {call} waits for the GPU, which a captured function cannot"
            )
        self._poll()
        stream = borrowed(self._chain.handle or 0)
        self._context.synchronize(stream, f"{self.name}: {call}")
        with on_stream(stream):
            found: np.ndarray[Any, Any] = self.results.get()
        return found

    def fetch(self, call: str) -> np.ndarray[Any, Any]:
        """Return all results as `look`; raise for what went wrong since the last time."""
        found = self.look(call)
        cut, beyond, outside = found[records.CUT : records.OUTSIDE + 1]
        if cut or beyond or outside:
            with on_stream(stream := borrowed(self._chain.handle or 0)):
                self.results[records.CUT : records.OUTSIDE + 1] = 0
                stream.synchronize()
        where = f"{self.name}: {call} failed"
        if outside:
            raise ValueError(f"{where}: bounds or numbers of rows were outside of their arrays")
        if beyond:
            raise CapacityError(f"{where}: {beyond} rows came beyond the end of arrays")
        if cut:
            raise CapacityError(
                f"{where}: more rows came or went than a slot of room={self.form.room} holds, and "
                "wait had no arrays for them. Give it arrays, or call counts before it"
            )
        if self._is_open:
            self._counted = found
        return found

    def _poll(self) -> None:
        """Let the stream of `start` wait for the rows, unless it did."""
        if self._is_open and not self._has_come:
            entered, _ = self._sent_on
            self._follow(entered)
            self.take(entered, 0, 0, 0)
            self._leave(entered)

    def counts(self) -> tuple[list[int], list[int]]:
        found, nkeys = self.fetch("counts"), len(self.form.keys)
        came, sent = (found[at : at + nkeys].tolist() for at in (records.CAME, records.SENT))
        return came, sent

    @property
    def device_counts(self) -> Any:
        self._poll()
        return self.results[records.CAME : records.CAME + len(self.form.keys)]

    def received(self, place: int) -> list[Any]:
        found, form = self.fetch("received"), self.form
        count, rows, scale = (
            int(found[each + place]) for each in (records.CAME, records.AT, records.SCALES)
        )
        if count > scale * form.room:
            raise CapacityError(
                f"{self.name}: received failed: {count} rows came in rounds, into the arrays that "
                "wait was given. Call counts before wait to have them here too"
            )
        return [
            view(begin, (count, *column.shape), column.dtype, self._buffers)
            for column, begin in zip(form.columns, self.slots.columns_at(rows, scale), strict=True)
        ]

    # --- memory of migrations

    def allocate(self, nbytes: int) -> int:
        """Return the address of memory on this GPU, until the engine closes."""
        block = self._context.suballocator.allocate(max(nbytes, 1))
        self._held.append(block)
        return int(block.address)

    def upload(self, array: np.ndarray[Any, Any]) -> int:
        """Return the address of a copy of an array, as `allocate`. Host-blocking."""
        address = self.allocate(array.nbytes)
        self._backend.upload(address, array, 0)
        self._context.drain(self.name)
        return address

    def _close_launches(self) -> None:
        self._launches.clear()
        self._seen.clear()
        self._messages.close()
        while self._held:
            self._held.pop().close()
        self.launcher.close()


def _is_on_gpu(number: Any) -> bool:
    return hasattr(number, "__cuda_array_interface__")


def view(address: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: Any) -> Any:
    """Return an array of CuPy for memory of the plan."""
    memory = cupy.cuda.UnownedMemory(address, prod(shape) * dtype.itemsize, owner)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


class _TakeArguments:
    """The arguments of `take_rows` that change from call to call."""

    def __init__(self) -> None:
        self.given = records.Bound()
        self.first, self.last = ctypes.c_int32(0), ctypes.c_int32(0)
        self.capacity, self.result = ctypes.c_uint64(0), ctypes.c_uint64(0)
        self.goals, self.kind = ctypes.c_uint64(0), ctypes.c_int32(0)


def _require_routes(setup: RoutedSetup) -> None:
    """Raise on all ranks if two of them can neither store into each other's memory nor use MPI."""
    forced = setup.same["MPISHARE_ROUTE"]
    if forced in (NCCL, GPU_MESSAGES):
        raise UnsupportedError(f"MPISHARE_ROUTE={forced}: rows travel by fused, or by mpi")
    slow = {
        (rank, peer): route
        for rank, mine in enumerate(setup.routes)
        for peer, route in mine.items()
        if route not in (FUSED, MESSAGES) and rank != peer
    }
    if slow:
        ranks = name_ranks({rank for pair in slow for rank in pair})
        raise UnsupportedError(
            f"rows in GPU memory travel within a node by route fused alone, and {ranks} have "
            f"{', '.join(sorted({*slow.values()}))}. Start MPS where ranks share a GPU "
            "(python -m mpishare.mps), or give NumPy arrays"
        )


def _require_size(name: str, form: Form) -> None:
    words, nkeys = words_of(form), max(form.nkeys)
    if words > records.MAX_LANES or nkeys > records.MAX_KEYS or not fits(form, 1):
        raise UnsupportedError(
            f"{name} on GPUs: rows of {words} words of up to 16 bytes, {nkeys} peers and "
            f"{form.room} rows each; allowed are {records.MAX_LANES} words and {records.MAX_KEYS} "
            "peers, 2^30 words of all rows, and 4 GiB of a peer's"
        )

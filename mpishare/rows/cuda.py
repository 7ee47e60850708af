"""The engine for columns in GPU memory: one kernel packs and signals, one waits and unpacks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from mpishare.backends import driver
from mpishare.backends.cuda_memory import cuda_array
from mpishare.backends.cuda_streams import borrowed, on_stream
from mpishare.coordination import recording
from mpishare.errors import CapacityError, UnsupportedError, name_ranks
from mpishare.memory.memory import ArrayLayout
from mpishare.plans.gpu.flags import Host
from mpishare.plans.gpu.launch import PlanLauncher, kernel
from mpishare.plans.gpu.plan_engine import CudaPlanEngine
from mpishare.plans.gpu.repeats import Repeated, SeenCalls
from mpishare.plans.gpu.replay import bind_last_stream
from mpishare.plans.layout import is_tensor
from mpishare.rows import records
from mpishare.rows.calls import int_of, require_count
from mpishare.rows.cuda_calls import Sending, Words, grouped
from mpishare.rows.cuda_messages import CudaMessages
from mpishare.rows.cuda_nccl import NcclRows
from mpishare.rows.cuda_slots import CudaSlots, fewest_words, fits
from mpishare.runtime.route import FUSED, GPU_MESSAGES, MESSAGES, NCCL

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mpishare.backends import StreamInfo
    from mpishare.plans.engine import RoutedSetup
    from mpishare.rows.form import Form

_SOURCE = Path(__file__).with_name("rows.cu")
_ROWS_OF_TILE = 32


class CudaRows(CudaPlanEngine):
    """The rows of one plan in GPU memory. Collective to make, host-blocking.

    Calls are remembered by their arrays, and made `again` with less work.
    """

    def __init__(self, setup: RoutedSetup, form: Form) -> None:
        super().__init__(setup, setup.chain)
        self.form, self.rank, self.size = form, setup.comm.rank, setup.comm.size
        _require_routes(setup)
        _require_size(setup.name, form)
        where = f"{setup.name}, rank {self.rank} of {self.size}"
        self.launcher = PlanLauncher(setup.context, where)
        self.words = Words(form, self.launcher.device)
        routes, self._host_routes = setup.my_routes, setup.host_routes
        far = [at for at, key in enumerate(form.keys) if routes[key.rank] in (MESSAGES, NCCL)]
        self.slots = self._buffers = CudaSlots(setup, form, {*far})
        used = {route for each in setup.routes for route in each.values()}
        self._has_stream_waits = NCCL in used  # which no loop of a graph has
        self._far = (NcclRows if NCCL in used else CudaMessages)(self, setup, far)
        self._peers, self._has_far = self._far.peers, bool(far)
        self.migration: Any = None
        self.places = form.places
        self._calls = SeenCalls()
        # Without C no call comes again.
        self._describe = getattr(setup.context.compiled_here, "describe", None)
        self._stream = 0  # for captures
        self.epoch = 0  # calls begun
        # Whether a call is between `start` and `wait`, and whether the stream waits for its rows.
        self.is_open, self._has_come = False, True
        # Results of the call that is open once the host has them, and whether it takes rounds.
        self._counted: list[int] | None = None
        self._has_more = False
        # The last start; its stream, None for the last one of the plan; what rounds may read.
        self._sent: tuple[Any, StreamInfo | None, Any]
        self._make(self._build)
        self._join_order()
        chain, agreement = self._chain, self.agreement
        order = None if far else self._order  # which holds for repeated graphs
        self._last_stream = bind_last_stream(chain, agreement, order)

    def _build(self) -> None:
        """Map the slots of the peers, and load the kernels."""
        self._stream = int(self._backend.new_stream())
        self._buffers.attach(0)
        launcher = self.launcher
        self.slots.fill()
        self._far.make_slots()
        self.sizes = self.slots.sizes(launcher)
        nbytes = 8 * records.RESULTS
        state, results = launcher.zeros(records.DEVICE_NBYTES), launcher.zeros(nbytes)
        self.results = self._view(results, (records.RESULTS,), np.dtype(np.int64))
        self._found = np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.int64, nbytes // 8)
        first = next(iter(self._comm.ranks_here))
        self._host = Host(self._flags.stalled_on(first), self._flags.abort)
        self._state = state, results
        names = "send_rows", "take_rows", "migrate_rows"
        self._kernels = {name: kernel(_SOURCE, name, (), self._device) for name in names}
        self.poll_all = [self.take(records.Lanes(), {}, [], records.NO_ROUNDS)]
        launcher.load(0)
        self._context.drain(self.name)

    # --- launches

    def launch(self, name: str, blocks: int, arguments: Sequence[Any], *last: Any) -> driver.Launch:
        """Return the launch of a kernel; arguments of ctypes are read when it is enqueued."""
        blocks = min(1 << max(0, blocks - 1).bit_length(), self.launcher.max_blocks)
        each = self.sizes, *arguments, *self._state, *last
        return driver.Launch(
            self._kernels[name], blocks, records.THREADS, each, self.launcher.where
        )

    def take(
        self,
        lanes: Any,
        set_of: Mapping[int, int],
        capacities: Sequence[int],
        kind: int,
        count: Any = None,
        result: Any = None,
        goals: int = 0,
    ) -> driver.Launch:
        """Return the launch that appends the rows of keys to the sets of columns that they have.

        `goals` is the address of those of a migration.
        """
        rows = self.form.room * sum(self.slots.scales[place] for place in set_of)
        sets = [set_of.get(place, records.NO_SET) for place in range(records.MAX_KEYS)]
        into, to = records.Into((*sets,), (*capacities,)), 0 if result is None else result.data.ptr
        arguments = lanes, into, kind, count or records.Bound(), to, goals, self.rank
        return self.launch("take_rows", self.blocks_for(rows, lanes.count), arguments, self._host)

    def blocks_for(self, rows: int, lanes: int) -> int:
        """Return the blocks with which each warp moves one tile."""
        tiles = -(-rows // _ROWS_OF_TILE) * -(-lanes // records.AT_ONCE)
        return max(1, -(-tiles // records.WARPS))

    # --- calls that come again

    def run(self, name: str, given: Any, call: Repeated, entered: StreamInfo) -> None:
        """Make a call; with what it was `given` it comes again, unless that is empty."""
        self._run(name, call, entered)
        self._leave(entered)
        found = self._describe((name, given)) if given and self._describe else None
        if found is not None:
            key, arrays, _ = found
            call.tensors_on = self._device if is_tensor(arrays[0]) else None
            self._calls.put(key, arrays, call)

    def _run(self, name: str, call: Repeated, entered: StreamInfo) -> None:
        sends = name != "wait"
        if sends:
            self.enqueue(entered, call.launches[:1])
            self.begin_epoch(is_open=name == "start")
            self._reach_far("start", self._far.send, entered)
        if name != "start":
            self.receive(entered, call.launches[sends:])
            self.is_open = False
            self._far.end(entered)

    def again(self, name: str, given: Any, stream: Any) -> bool:
        """Make a call as before, if nothing but ints has changed, on the same stream.

        And if no slot is to grow; else return False, with nothing done.
        """
        if self._describe is None or stream is not None or (name == "wait" and self._has_more):
            return False
        found = self._describe((name, given))
        call = found and self._calls.get(*found[:2])
        if call is None or (handle := self._last_stream(call.tensors_on)) is None:
            return False
        sends, is_open, entered = name != "wait", name == "start", self._chain.last
        if sends and not self._has_slots(entered):
            return False
        _, arrays, ints = found
        if call.ints != ints:
            call.set(ints)
        if self._has_far:
            self._run(name, call, entered)
        else:
            if sends:
                self.begin_epoch(is_open=is_open)
            call.repeat(handle)
        self.is_open, self._has_come = is_open, not is_open
        if is_open:
            self._sent = call, None, arrays
        return True

    def _has_slots(self, entered: StreamInfo) -> bool:
        """Whether a call that sends has the slots of the last one."""
        if self._has_far:
            self._far.begin(entered)
        return bytes(self.slots.offers) == self.slots.settled

    # --- calls

    def begin(self, entered: StreamInfo) -> None:
        """Let a call that sends come after the last one; a captured one grows no slots."""
        self._follow(entered)
        self._far.begin(entered)
        if not entered[3] and self.slots.grow():
            if self.migration is not None:
                self.migration.keep(entered)
            self.staging_nbytes = self.slots.nbytes
            if not self.slots.settled:
                self._calls.clear()  # their launches are for smaller slots
            if self.slots.is_changed:
                self.slots.publish(entered[0])

    def start(self, columns: list[Any], rows: Mapping[Any, Any], stream: Any) -> None:
        call = Sending(self, columns, rows, self._stream)
        entered = self._enter("start", columns, stream)
        self.begin(entered)
        self.run("start", (columns, rows), call, entered)
        self._sent = call, entered, [*rows.values()]

    def enqueue(self, entered: StreamInfo, launches: Sequence[driver.Enqueued]) -> None:

        def enqueue() -> None:
            for each in launches:
                each.enqueue(entered[0])

        self._in_order(enqueue, entered)

    def begin_epoch(self, *, is_open: bool) -> None:
        self._flags.calls[0] += 1
        self.epoch += 1
        self.is_open, self._has_come = is_open, False
        self._counted, self._has_more = None, False

    def pack_again(self, keys: int, stream: int) -> None:
        """Pack what was started once more for some keys, a bit each."""
        self._sent[0].launch(keys).enqueue(stream)

    def _gather(self, entered: StreamInfo) -> None:
        """Take all rows into slots that have room, where `counts` saw more."""
        if not self._has_more or (found := self._counted) is None:
            return
        epoch = found[records.EPOCH]
        for place in range(len(self.form.keys)):
            count = found[records.CAME + place]
            if count <= found[records.SCALES + place] * self.form.room:
                continue
            self.slots.enlarge(place, count, is_needed=True)
            scale = self.slots.scales[place]
            rows = self.slots.bases[place] + (epoch & 1) * scale * self.slots.slot
            lanes = records.Lanes.from_buffer_copy(self._sent[0].lanes)
            for lane in lanes.of[: lanes.count]:
                lane.column = rows + scale * lane.slot
            take = self.take(lanes, {place: 0}, [count], records.ROUNDS)
            self.receive(entered, [take])
            words = np.array([rows, scale], np.uint64)
            header = self.slots.header_at(place, epoch)
            self.slots.upload(header + 8 * records.ROWS, words, entered[0])

    def place(self, into: Mapping[Any, list[Any]], stream: Any) -> None:
        arrays = [each for columns in into.values() for each in columns]
        found = [(self.places[name], *self.words.of(columns)) for name, columns in into.items()]
        entered = self._enter("wait", arrays, stream)
        self._follow(entered)
        self._gather(entered)
        groups = grouped(found)
        if not found and (self._has_far or self._has_more or self._counted is None):
            groups = [(records.Lanes(), {}, [])]
        kinds = [records.ROUNDS] * (len(groups) - 1) + [records.LAST_ROUNDS]
        launches = [self.take(*each, kind) for each, kind in zip(groups, kinds, strict=False)]
        call = Repeated(launches, self._stream, self.launcher.where)
        self.run("wait", found and (into, None, None), call, entered)

    def append(self, columns: list[Any], count: Any, stream: Any) -> Any:
        lanes, capacity = self.words.of(columns)
        entered = self._enter("wait", columns, stream)
        result, bound = self.count_of(count, entered)
        self._follow(entered)
        self._gather(entered)
        keys, kind = dict.fromkeys(self.places.values(), 0), records.LAST_ROUNDS
        take = self.take(lanes, keys, [capacity], kind, bound, result)
        call = Repeated([take], self._stream, self.launcher.where)
        self.run("wait", result is count and (columns, "append", count), call, entered)
        return result

    def receive(self, entered: StreamInfo, launches: Sequence[driver.Enqueued]) -> None:
        """Let the stream wait for the rows of all peers, and take them."""
        is_traded, self._has_come = self._has_come, True
        if self._has_far and not is_traded:
            self._reach_far("wait", self._far.trade, entered)
        self.enqueue(entered, launches)

    def _reach_far(
        self, call: str, reach: Callable[[StreamInfo], None], entered: StreamInfo
    ) -> None:
        """Reach other nodes; where that fails this rank leaves, as they have rows or wait for them.

        Not in `Blocked`, as on hosts: a wait for a stream asks at its end whether the node's thread
        may go on.
        """
        try:
            reach(entered)
        except BaseException as error:
            self.agreement.life.leave(f"{self.name}: {call}", error)
            raise

    def count_of(self, count: Any, entered: StreamInfo) -> tuple[Any, Any]:
        """Return the array for a new count, and the old one as kernels take it."""
        if hasattr(type(count), "__cuda_array_interface__"):
            require_count(count)
            return count, records.Bound(count.data.ptr, 0, count.itemsize)
        if (number := int_of(count, "count")) < 0:
            raise ValueError(f"count is {count}")
        if entered[3]:
            raise UnsupportedError(
                f"{self.name}: count is an int, and the stream is being captured into a graph: "
                "replays would write into a result that may be gone by then. Give an array"
            )
        with on_stream(borrowed(entered[0])):
            return cupy.empty((), np.int64), records.Bound(0, number)

    # --- what came

    def fetch(self, call: str) -> list[int]:
        """Return all results, once the stream has them; raise for what went wrong since."""
        if recording.current() is not None:
            raise UnsupportedError(
                f"{self.name}: {call} waits for the GPU, which a captured function cannot"
            )
        self._poll()
        handle, backend, pinned = self._chain.handle or 0, self._backend, self._found
        backend.copy(pinned.ctypes.data, self.results.data.ptr, pinned.nbytes, handle)
        self._context.wait_until(lambda: backend.is_done(handle), f"{self.name}: {call}")
        found: list[int] = pinned.tolist()
        cut, beyond, outside = found[records.CUT : records.OUTSIDE + 1]
        if cut or beyond or outside:
            with on_stream(stream := borrowed(handle)):
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
                "wait had no arrays for them, or NCCL took them once the plan had been captured. "
                "Give wait arrays, call counts before it, or make the plan with more room"
            )
        if self.is_open:
            self._counted = found
            self._has_more = any(
                found[records.SENT + at] > room
                or found[records.CAME + at] > found[records.SCALES + at] * self.form.room
                for at, room in enumerate(self.slots.rooms)
            )
        return found

    def _poll(self) -> None:
        """Let the stream of `start` wait for the rows, unless it did."""
        if self.is_open and not self._has_come:
            entered = self._sent[1] or self._chain.last
            self._follow(entered)
            self.receive(entered, self.poll_all)
            self._leave(entered)

    def counts(self) -> tuple[list[int], list[int]]:
        # Of one exchange `counts` and `sent` look once, until `wait` may have left rows out.
        found = (self.is_open and self._counted) or self.fetch("counts")
        nkeys = len(self.form.keys)
        came, sent = (found[at : at + nkeys] for at in (records.CAME, records.SENT))
        return came, sent

    @property
    def device_counts(self) -> Any:
        self._poll()
        return self.results[records.CAME : records.CAME + len(self.form.keys)]

    def received(self, place: int) -> list[Any]:
        found, form = self.fetch("received"), self.form
        count, rows, scale = (
            found[at + place] for at in (records.CAME, records.AT, records.SCALES)
        )
        if count > scale * form.room:
            raise CapacityError(
                f"{self.name}: received failed: {count} rows came in rounds, into the arrays that "
                "wait was given. Call counts before wait to have them here too"
            )
        return [
            self._view(begin, (count, *column.shape), column.dtype)
            for column, begin in zip(form.columns, self.slots.columns_at(rows, scale), strict=True)
        ]

    def _view(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return an array for memory of the plan, which it holds."""
        layout = ArrayLayout(shape, dtype)
        return cuda_array(self._buffers, address, layout.nbytes, self._device, layout)

    # --- watching and closing

    def _progress(self) -> tuple[int, bool]:
        done, is_under_way = self._flags.progress()
        return done, is_under_way and self._has_far and self._has_come

    def is_over(self) -> bool:
        return super().is_over() and self._backend.is_done(self._stream)

    def _close_launches(self) -> None:
        self._calls.clear()
        self._far.close()
        if self._stream:
            self._backend.close_stream(self._stream)
        self.launcher.close()


def _require_routes(setup: RoutedSetup) -> None:
    """Raise on all ranks if two of them have none of the routes of rows."""
    forced = setup.same["MPISHARE_ROUTE"]
    if forced == GPU_MESSAGES:
        raise UnsupportedError(f"MPISHARE_ROUTE={forced}: rows travel by fused, nccl or mpi")
    slow = {
        (rank, peer): route
        for rank, mine in enumerate(setup.routes)
        for peer, route in mine.items()
        if route not in (FUSED, NCCL, MESSAGES) and rank != peer
    }
    if slow:
        ranks = name_ranks({rank for pair in slow for rank in pair})
        raise UnsupportedError(
            f"rows in GPU memory travel within a node by route fused alone, and {ranks} have "
            f"{', '.join(sorted({*slow.values()}))}. Start MPS where ranks share a GPU "
            "(python -m mpishare.mps), or give NumPy arrays"
        )


def _require_size(name: str, form: Form) -> None:
    words, nkeys = fewest_words(form), max(form.nkeys)
    if words > records.MAX_LANES or nkeys > records.MAX_KEYS or not fits(form, 1):
        raise UnsupportedError(
            f"{name} on GPUs: rows of {words} words of up to 16 bytes, {nkeys} peers and "
            f"{form.room} rows each; allowed are {records.MAX_LANES} words and {records.MAX_KEYS} "
            "peers, 2^30 words of all rows, and 4 GiB of a peer's"
        )

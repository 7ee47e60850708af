"""The engine of fields in GPU memory: routes ``fused``, ``copy``, ``pinned``, ``mpi``."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mpishare.backends.driver import launch_graph
from mpishare.coordination.mpi_agreement import never_free
from mpishare.device.launch_order import LaunchOrder
from mpishare.errors import UnsupportedError
from mpishare.halo.cuda.buffers import Buffers
from mpishare.halo.cuda.direction import Direction
from mpishare.halo.cuda.fused import Fused
from mpishare.halo.cuda.kernels import Launcher
from mpishare.halo.cuda.streamed import StreamedRoutes
from mpishare.halo.cuda.strided import alignment_of
from mpishare.plans.disjoint import Disjoint
from mpishare.plans.gpu.fields import addresses_of
from mpishare.plans.gpu.plan_engine import CudaPlanEngine
from mpishare.plans.gpu.replay import (
    BesideFused,
    ByMessages,
    bind_last_stream,
    bind_replay,
    bind_wait,
)
from mpishare.plans.layout import require_number
from mpishare.plans.message import ALIGN

if TYPE_CHECKING:
    from mpishare.backends import StreamInfo
    from mpishare.plans.engine import RoutedSetup
    from mpishare.plans.message import Message
    from mpishare.plans.mpi_route import MpiMessages


class Launches(NamedTuple):
    """The launches of one exchange for one alignment of the fields; None for none."""

    streamed: StreamedRoutes | None
    fused: Fused | None


Call = tuple[Sequence[Any], tuple[int, ...], Launches]
"""A checked call: fields, addresses, launches. A plain tuple, as each call makes one."""


Handles = tuple[dict[Any, int], dict[Any, int]]
"""Graphs by the addresses of fields: of `exchange` and of `start` by the fused kernel; or of the
packing and the unpacking of messages."""


def _never(*_: Any) -> bool:
    return False


class CudaEngine(CudaPlanEngine):
    """One direction of one plan on CUDA. Collective to make, host-blocking."""

    def __init__(
        self,
        setup: RoutedSetup,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        *,
        is_reverse: bool,
    ) -> None:
        super().__init__(setup)
        comm, name = setup.comm, setup.name
        # Others may have made another GPU the current one: JAX does where it finds its GPUs.
        self._backend.make_current()
        self._layouts = setup.mine
        self._disjoint = Disjoint(setup.mine)
        self._alignments = [alignment_of(layout) for layout in self._layouts]
        direction = Direction(setup, sends, recvs, is_reverse=is_reverse)
        self._buffers: Buffers = Buffers(direction, comm, name)
        where = f"{name}, rank {comm.rank} of {comm.size}"
        self._launcher = Launcher(direction, comm.context, where)
        self._launches: list[Launches] = []
        self._events: list[Any] = []
        self._stream = 0
        self._replays: list[StreamedRoutes] = []
        handles: Handles = {}, {}
        packing: Handles = {}, {}
        self._make(lambda: self._build(direction, handles, packing))
        self._forked, self._joined = self._events
        self._chain = setup.chain
        if direction.has_fused:
            self._order = LaunchOrder.join(self._backend)
        # Routes of all ranks, so that all refuse a capture or none does.
        used = {route for routes in setup.routes for route in routes.values()}
        self._host_routes = sorted(route for route in used if route.waits_in == "host")
        self._has_stream_waits = any(
            route.waits_in == "stream" and peer != rank
            for rank, routes in enumerate(setup.routes)
            for peer, route in routes.items()
        )
        self.try_fast = self.try_start = self.try_wait = _never
        self._bind_replays(handles, packing, is_streamed=direction.is_streamed)

    def _bind_replays(self, handles: Handles, packing: Handles, *, is_streamed: bool) -> None:
        chain, order, device = self._chain, self._order, self._layouts[0].device
        bind = functools.partial(bind_last_stream, chain, self.agreement, device)
        replay_of = functools.partial(
            bind_replay, self._layouts, flags=self._flags, where=chain.name
        )
        if order is not None and not is_streamed:
            self.try_fast = replay_of(handles[0], bind(order), first=self._launch_first)
            on_own = bind(order, self._stream)
            first = self._start_first
            self.try_start = replay_of(handles[1], on_own, first=first, enqueue=self._fork)
            self.try_wait = bind_wait(bind(), self._join)
        elif self._replays:
            routes = self._replays[0]  # for any alignment: graphs are by address
            found = ByMessages(*packing, routes.replayed_in_place)
            if order is None:
                self.try_fast = replay_of(found, bind(), enqueue=routes.replay)
            else:
                beside, on_own = BesideFused(handles[1], found), bind(order, self._stream)
                self.try_fast = replay_of(beside, on_own, enqueue=self._replay_beside)

    def _build(self, direction: Direction, handles: Handles, packing: Handles) -> None:
        """Map the others' buffers; make a stream, events and launches."""
        buffers, launcher, backend = self._buffers, self._launcher, self._backend
        self._stream = int(backend.new_stream())
        buffers.attach(self._stream)
        buffers.make_mpi()
        self._events += [backend.local_event(), backend.local_event()]
        # For fields aligned to the widest unit, and for any others.
        for alignments in ([ALIGN] * len(self._layouts), self._alignments):
            if self._launches and self._serves_all(self._launches[0]):
                self._launches.append(self._launches[0])
                break
            arguments = direction, buffers, launcher, alignments
            streamed = StreamedRoutes(self._context, *arguments) if direction.is_streamed else None
            fused = Fused(*arguments, self._stream, handles) if direction.has_fused else None
            if streamed is not None and streamed.cache_graphs(launcher, self._stream, packing):
                self._replays.append(streamed)
            self._launches.append(Launches(streamed, fused))
        launcher.load(self._stream)
        # Until all uploads have arrived, kernels are loaded, and no other plan's kernel runs.
        self._context.drain(self.name)

    def _serves_all(self, launches: Launches) -> bool:
        """Whether launches for well aligned fields are right for all others, too."""
        streamed, fused = launches
        return streamed is None and fused is not None and fused.is_for(self._alignments)

    def prepare(self, fields: Sequence[Any]) -> Call:
        """Check the fields of a call, and choose its launches."""
        require_number(fields, len(self._layouts))
        addresses = addresses_of(fields, self._layouts)
        self._disjoint.require(addresses)
        aligned, unaligned = self._launches
        if not functools.reduce(operator.or_, addresses) % ALIGN:
            return fields, addresses, aligned
        for address, alignment in zip(addresses, self._alignments, strict=True):
            if address % alignment:
                raise ValueError(
                    f"a field begins at {address:#x}, which is not a multiple of {alignment} bytes"
                )
        return fields, addresses, unaligned

    def start(self, call: Call, stream: Any) -> None:
        """Send. Fused neighbors run on the plan's own stream, up to the ghosts."""
        entered = self._enter_call("start", call, stream)
        self._start(call, entered)
        self._leave(entered)

    def wait(self, call: Call, stream: Any) -> None:
        """Receive into the ghosts; the user's stream waits for the plan's own."""
        entered = self._enter_call("wait", call, stream)
        self._wait(call, entered)
        self._leave(entered)

    def exchange(self, call: Call, stream: Any) -> None:
        """Do both on the user's stream; beside messages, fused neighbors run on the plan's own."""
        entered = self._enter_call("exchange", call, stream)
        _, addresses, (streamed, fused) = call
        if streamed is not None and fused is not None and streamed.stages:
            self._start(call, entered)
            self._wait(call, entered)
        else:
            if streamed is not None:
                streamed.start(entered[0], addresses)
            if fused is not None:
                self._launch_in_order(fused.alone, entered, addresses)
            if streamed is not None:
                streamed.receive(addresses)
            self._flags.calls[0] += 1
            self._wait_streamed(call, entered[0])
        self._leave(entered)

    def _start(self, call: Call, entered: StreamInfo) -> None:
        handle, _, _, is_captured = entered
        _, addresses, (streamed, fused) = call
        if fused is not None:
            # The kernel on the plan's own stream and the packs do not wait for each other.
            self._follow_user(handle)
        if streamed is not None:
            streamed.start(handle, addresses)
        if fused is not None:
            # On the user's stream the kernel would hold up the work on the interior. The plan's own
            # stream lives as long as the plan, which waits for it before it closes.
            own = self._stream, self, True, is_captured
            self._launch_in_order(fused.beside, own, addresses)
        if streamed is not None:
            streamed.receive(addresses)  # which takes the host longer than the launch
        self._flags.calls[0] += 1

    def _wait(self, call: Call, entered: StreamInfo) -> None:
        handle, *_ = entered
        self._wait_streamed(call, handle)
        if call[2].fused is not None:
            self._join(handle)

    def _wait_streamed(self, call: Call, handle: int) -> None:
        fields, addresses, (streamed, _) = call
        if streamed is None:
            return
        try:
            streamed.wait(handle, addresses)
        except BaseException:
            never_free(fields)  # a message may still arrive
            raise

    def ahead(self) -> list[int]:
        """See `Engine.ahead`."""
        return self._flags.ahead()

    def _is_over(self) -> bool:
        return super()._is_over() and self._backend.is_done(self._stream)

    def _close_launches(self) -> None:
        for launches in self._launches:
            for each in launches:
                if each is not None:
                    each.close()
        self._backend.close_events(self._events)
        if self._stream:
            self._backend.close_stream(self._stream)
        self._launcher.close()

    def _follow_user(self, handle: int) -> None:
        self._backend.record(self._forked, handle)
        self._backend.wait_event(self._forked, self._stream)

    def _fork(self, graph: int, handle: int, where: str) -> None:
        """Launch a graph on the plan's own stream, after the work on the user's."""
        self._follow_user(handle)
        launch_graph(graph, self._stream, where)

    def _replay_beside(
        self, found: tuple[int, MpiMessages | tuple[int, int]], handle: int, where: str
    ) -> None:
        """Exchange by the graph of the fused kernel, and by messages while it runs."""
        graph, messages = found
        routes = self._replays[0]
        self._follow_user(handle)
        routes.replay_pack(messages, handle, where)
        launch_graph(graph, self._stream, where)
        routes.replay_messages(messages, handle, where)
        self._join(handle)

    def _launch_first(self, addresses: tuple[int, ...], handle: int) -> bool:
        """Launch the fused kernel for CuPy arrays without a graph, or return False."""
        fused = self._fused_for(addresses)
        if fused is None:
            return False
        fused.alone.enqueue(handle, addresses, is_captured=False)
        return True

    def _start_first(self, addresses: tuple[int, ...], handle: int) -> bool:
        """The same on the plan's own stream."""
        fused = self._fused_for(addresses)
        if fused is None:
            return False
        self._follow_user(handle)
        fused.beside.enqueue(self._stream, addresses, is_captured=False)
        return True

    def _fused_for(self, addresses: tuple[int, ...]) -> Fused | None:
        """Return the launches for well aligned, disjoint arrays on this rank's GPU."""
        is_aligned = not functools.reduce(operator.or_, addresses) % ALIGN
        is_served = is_aligned and self._disjoint.are_apart(addresses)
        return self._launches[0].fused if is_served else None

    def _join(self, handle: int) -> None:
        """Let the user's stream wait for the plan's own."""
        self._backend.record(self._joined, self._stream)
        self._backend.wait_event(self._joined, handle)

    def _enter_call(self, name: str, call: Call, stream: Any) -> StreamInfo:
        """Return the stream of a call, ordered after the plan's last call."""
        entered = self._enter(name, call[0], stream)
        *_, is_captured = entered
        if is_captured and self._host_routes:
            raise UnsupportedError(
                f"{self.name}: {name} failed: the stream is being captured into a graph, and the "
                f"routes {self._host_routes} need the host at every exchange. "
                "Call it outside of the capture, or refuse these routes with require=."
            )
        self._follow(entered)
        return entered

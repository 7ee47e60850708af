"""The engine of fields in GPU memory: routes ``fused``, ``copy``, ``pinned``, ``mpi``."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mpishare.backends.driver import graph_launch
from mpishare.plans.disjoint import Disjoint
from mpishare.plans.exchange.cuda.buffers import Buffers
from mpishare.plans.exchange.cuda.direction import Direction
from mpishare.plans.exchange.cuda.fused import Fused
from mpishare.plans.exchange.cuda.given_back import in_one_kernel
from mpishare.plans.exchange.cuda.kernels import Launcher
from mpishare.plans.exchange.cuda.regions import adds_in_kernel
from mpishare.plans.exchange.cuda.streamed import StreamedRoutes
from mpishare.plans.exchange.cuda.strided import alignment_of
from mpishare.plans.gpu.fields import addresses_of
from mpishare.plans.gpu.plan_engine import CudaPlanEngine
from mpishare.plans.gpu.replay import bind_last_stream, bind_replay, bind_wait, never
from mpishare.plans.layout import require_number
from mpishare.plans.message import ALIGN
from mpishare.runtime.route import NCCL

if TYPE_CHECKING:
    from mpishare.backends import StreamInfo
    from mpishare.plans.engine import RoutedSetup
    from mpishare.plans.gpu.graphs import GraphCache
    from mpishare.plans.gpu.nccl import NcclPeers
    from mpishare.plans.layout import FieldLayout


class Launches(NamedTuple):
    """The launches of one exchange for one alignment of the fields; None for none.

    `whole` are all of them, where neither the host nor streams wait.
    """

    streamed: StreamedRoutes | None
    fused: Fused | None
    whole: GraphCache | None


Call = tuple[Sequence[Any], tuple[int, ...], Launches]
"""A checked call: fields, addresses, launches. A plain tuple, as each call makes one."""
Handles = tuple[dict[Any, int], dict[Any, int]]
"""Graphs by `key_of` the fields' addresses."""


class CudaEngine(CudaPlanEngine):
    """One direction of one plan on CUDA. Collective to make, host-blocking."""

    def __init__(self, setup: RoutedSetup) -> None:
        super().__init__(setup, setup.chain)
        comm, name = setup.comm, setup.name
        self._setup, self._layouts = setup, setup.mine
        self._disjoint = Disjoint(setup.mine)
        self._alignments = [alignment_of(layout) for layout in self._layouts]
        direction = Direction(setup, adds_in_kernel=adds_in_kernel(setup))
        self._buffers: Buffers = Buffers(direction, comm, name)
        where = f"{name}, rank {comm.rank} of {comm.size}"
        self._launcher = Launcher(direction, comm.context, where)
        self._launches: list[Launches] = []
        self._events: list[Any] = []
        self._stream = 0
        self._shifts, self._adds = setup.shifts, setup.adds
        handles: Handles = {}, {}  # of `exchange` and of `start` by the fused kernel
        self._peers = _connect(setup, direction)
        self._make(lambda: self._build(direction, handles))
        if self._buffers.nccl is None:
            self._peers = None  # of other ranks alone
        forked, self._packed, joined = self._events
        # Of the user's stream, for which the plan's own waits, and which waits for that. As methods
        # they would be 2 % of a start and its wait.
        self._follow_user = functools.partial(self._backend.order, forked, then=self._stream)
        self._join = functools.partial(self._backend.order, joined, self._stream)
        if direction.has_fused or self._buffers.nccl is not None:
            self._join_order()
        self._host_routes = setup.host_routes
        self._has_stream_waits = _has_stream_waits(setup)
        self._as_fields = setup.as_fields
        # Replays of calls with fields that were seen; they return False, with nothing done, for
        # all others.
        self._try_exchange = self._try_start = self._try_wait = never
        self._prepared: Call | None = None  # what was started, unless by a replay
        if setup.mine:
            self._bind_replays(handles, setup.given or setup.mine)

    def _bind_replays(self, handles: Handles, layouts: Sequence[FieldLayout]) -> None:
        order, own, where = self._order, self._stream, self._chain.name
        bind = functools.partial(bind_last_stream, self._chain, self.agreement)
        replay_of = functools.partial(bind_replay, layouts, flags=self._flags, where=where)
        streamed, fused, whole = self._launches[0]
        if whole is not None:
            first = functools.partial(self._launch_first, whole)
            self._try_exchange = replay_of(
                handles[0].get, bind(order), first=first, enqueue=self._after_slides(graph_launch)
            )
        if fused is not None and streamed is None:
            first = functools.partial(self._launch_first, fused.beside, own=own)
            on_own = bind(order, own)
            self._try_start = replay_of(
                handles[1].get,
                on_own,
                first=first,
                enqueue=self._after_slides(self._fork),
                with_tensors=False,
            )
            self._try_wait = bind_wait(bind(), self._join)

    def both_ways(self) -> CudaEngine | None:
        """See `HostEngine.both_ways`: by one kernel, where either way is one."""
        both = in_one_kernel(self._setup)
        return None if both is None else CudaEngine(both)

    def _after_slides(self, enqueue: Callable[..., None]) -> Callable[..., None]:
        """Let a replay follow the kernel that finds the places for the shifts of a call, if any."""
        slides, shifts = self._launcher.slides, self._shifts
        if not slides:
            return enqueue

        def enqueue_both(found: Any, handle: int) -> None:
            slides.enqueue(handle, shifts.values)
            enqueue(found, handle)

        return enqueue_both

    def _build(self, direction: Direction, handles: Handles) -> None:
        """Map the others' buffers; make a stream, events and launches."""
        buffers, launcher, backend = self._buffers, self._launcher, self._backend
        self._stream = launcher.asides.own = int(backend.new_stream())
        buffers.attach(self._stream)
        buffers.make_messages(self._peers, launcher.pointers)
        self._events += [backend.local_event() for _ in range(3)]
        # For fields as they usually are, aligned to the widest unit, and for any others.
        for are_usual in (True, False):
            if not are_usual and self._serve_all(self._launches[0]):
                self._launches *= 2  # to make others would take a tenth of the plan's time
                break
            alignments = [ALIGN] * len(self._layouts) if are_usual else self._alignments
            arguments = direction, buffers, launcher, alignments
            fused = Fused(*arguments, self._stream, handles) if direction.has_fused else None
            streamed, whole = None, None if fused is None else fused.alone
            if direction.is_streamed:
                streamed = StreamedRoutes(self._context, *arguments, may_stay=are_usual)
                whole = streamed.whole(fused, self._stream, handles[0])
            if whole is not None and buffers.nccl is not None:
                buffers.nccl.ranks.graphs.add(whole)  # they end with their communicator
            self._launches.append(Launches(streamed, fused, whole))
        launcher.slides.prepare(len(self._shifts.values))
        launcher.load(self._stream)
        # Now, since to load its kernel later would wait for the streams.
        launcher.slides.enqueue(self._stream, [0] * len(self._shifts.values))
        # Until all uploads have arrived, kernels are loaded, and no other plan's kernel runs.
        self._context.drain(self.name)

    def _serve_all(self, usual: Launches) -> bool:
        """Whether the launches for fields as they usually are are right for any others."""
        streamed, fused, _ = usual
        return streamed is None and fused is not None and fused.is_for(self._alignments)

    def require(self, fields: Sequence[Any]) -> Call:
        """Check the fields of a call, and choose its launches."""
        self.agreement.check()
        fields = self._as_fields(fields)
        require_number(fields, len(self._layouts))
        addresses = addresses_of(fields, self._layouts)
        self._disjoint.require(addresses)
        addresses = addresses or (0,)  # of no field
        usual, others = self._launches
        if self._are_usual(addresses):
            return fields, addresses, usual
        for address, alignment in zip(addresses, self._alignments, strict=True):
            if address % alignment:
                raise ValueError(
                    f"a field begins at {address:#x}, which is not a multiple of {alignment} bytes"
                )
        return fields, addresses, others

    def _are_usual(self, addresses: tuple[int, ...]) -> bool:
        """Whether fields at these addresses are aligned, and NCCL may take cells out of them."""
        nccl = self._buffers.nccl
        if nccl is not None:
            return nccl.may_stay(addresses)
        return not functools.reduce(operator.or_, addresses) % ALIGN

    def start(self, fields: Sequence[Any], stream: Any) -> None:
        """Send. Fused neighbors run on the plan's own stream, up to the ghosts."""
        self._prepared = None
        if self._try_start(fields, stream):
            return
        call = self.require(fields)
        entered = self._enter_call("start", call, stream)
        self._start(call, entered)
        self._leave(entered)
        self._prepared = call

    def wait(self, fields: Sequence[Any], stream: Any) -> None:
        """Receive into the ghosts; the user's stream waits for the plan's own."""
        if self._prepared is None and self._try_wait(stream):
            return
        call = self._prepared or self.require(fields)
        entered = self._enter_call("wait", call, stream)
        self._wait(call, entered)
        self._leave(entered)
        self._prepared = None

    def exchange(self, fields: Sequence[Any], stream: Any) -> None:
        """Do both on the user's stream; beside messages, fused neighbors run on the plan's own.

        Not where they add: the sums of messages come after theirs.
        """
        if self._try_exchange(fields, stream):
            return
        call = self.require(fields)
        entered = self._enter_call("exchange", call, stream)
        _, addresses, (streamed, fused, whole) = call
        if whole is not None:
            self._launch_in_order(whole, entered, addresses)
            self._flags.calls[0] += 1
        elif streamed is None or (streamed.has_messages and fused is not None and not self._adds):
            self._start(call, entered)
            self._wait(call, entered)
        else:
            streamed.start(entered[0], addresses)
            if fused is not None:
                self._launch_in_order(fused.alone, entered, addresses)
            self._flags.calls[0] += 1
            self._wait_streamed(call, entered)
        self._leave(entered)

    def _start(self, call: Call, entered: StreamInfo) -> None:
        handle, _, _, is_captured = entered
        own = self._stream, self, True, is_captured
        _, addresses, (streamed, fused, _) = call
        if fused is not None:
            # The kernel on the plan's own stream and the packs do not wait for each other.
            self._follow_user(handle)
        if streamed is not None:
            streamed.start(handle, addresses)
        if fused is not None:
            # On the user's stream the kernel would hold up the work on the interior. The plan's own
            # stream lives as long as the plan, which waits for it before it closes.
            self._launch_in_order(fused.beside, own, addresses)
        if streamed is not None and streamed.nccl is not None:
            # Behind the fused kernel: side by side the two could each wait for room on a GPU that
            # the other fills.
            self._backend.order(self._packed, handle, self._stream)
            self._in_order(functools.partial(streamed.nccl.enqueue, self._stream), own)
        self._flags.calls[0] += 1

    def _wait(self, call: Call, entered: StreamInfo) -> None:
        handle, *_ = entered
        streamed, fused, _ = call[2]
        is_on_own = streamed is not None and streamed.nccl is not None
        if is_on_own:
            self._join(handle)
        self._wait_streamed(call, entered)
        if fused is not None and not is_on_own:
            self._join(handle)

    def _wait_streamed(self, call: Call, entered: StreamInfo) -> None:
        _, addresses, (streamed, *_) = call
        if streamed is not None:
            streamed.wait(entered[0], addresses)

    def _progress(self) -> tuple[int, bool]:
        done, is_under_way = self._flags.progress()
        # What was started and not waited for waits for this rank's own call.
        return done, is_under_way and self._prepared is None

    def is_over(self) -> bool:
        return super().is_over() and self._backend.is_done(self._stream)

    def _close_launches(self) -> None:
        for _, fused, whole in self._launches:
            for each in (fused, whole):
                if each is not None:
                    each.close()
        self._backend.close_events(self._events)
        if self._stream:
            self._backend.close_stream(self._stream)
        self._launcher.close()

    def _fork(self, graph: int, handle: int) -> None:
        """Launch a graph on the plan's own stream, after the work on the user's."""
        self._follow_user(handle)
        graph_launch(graph, self._stream)

    def _usual_addresses(self, key: Any) -> tuple[int, ...] | None:
        """Return the addresses of a key if the fields there are right, and as they usually are."""
        addresses = key if isinstance(key, tuple) else (key,)
        is_usual = self._are_usual(addresses)
        return addresses if is_usual and self._disjoint.are_apart(addresses) else None

    def _launch_first(self, launch: GraphCache, key: Any, handle: int, own: int = 0) -> bool:
        """Launch the fused kernel for CuPy arrays without a graph, or return False.

        On the plan's own stream if it is given.
        """
        addresses = self._usual_addresses(key)
        if addresses is None:
            return False
        self._launcher.slides.enqueue(handle, self._shifts.values)
        if own:
            self._follow_user(handle)
        launch.enqueue(own or handle, addresses, is_captured=False)
        self._flags.calls[0] += 1
        return True

    def _enter_call(self, name: str, call: Call, stream: Any) -> StreamInfo:
        entered = self._enter(name, call[0], stream)
        self._follow(entered)
        if name != "wait":
            self._launcher.slides.enqueue(entered[0], self._shifts.values)
        return entered


def _connect(setup: RoutedSetup, direction: Direction) -> NcclPeers | None:
    """Return the peers on route `nccl`; None if no rank has any. Collective, host-blocking."""
    if not any(NCCL in routes.values() for routes in setup.routes):
        return None
    from mpishare.plans.gpu.nccl import NcclPeers

    return NcclPeers(setup.comm, setup.name, setup.full_call, direction.peers(NCCL))


def _has_stream_waits(setup: RoutedSetup) -> bool:
    return any(
        route.waits_in == "stream" and route is not NCCL and peer != rank
        for rank, routes in enumerate(setup.routes)
        for peer, route in routes.items()
    )

"""The base of engines on CUDA: the order of calls, whether they are over, draining, exit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.coordination import recording
from mpishare.coordination.counters import NO_WORDS
from mpishare.errors import UnsupportedError
from mpishare.plans.engine import PlanEngine
from mpishare.plans.gpu.fields import current_stream, is_captured
from mpishare.runtime.launch_order import LaunchOrder
from mpishare.runtime.stream_chain import StreamChain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.backends import StreamInfo
    from mpishare.plans.engine import PlanSetup
    from mpishare.plans.gpu.flags import PinnedFlags
    from mpishare.plans.gpu.graphs import GraphCache
    from mpishare.plans.gpu.nccl import NcclPeers, NcclRanks
    from mpishare.plans.gpu.staging import PlanBuffers


class CudaPlanEngine(PlanEngine):
    """Calls that are enqueued on streams, and counted in the flags of the plan.

    `chain` orders them with those of other engines of the plan; by default it is the engine's own.
    """

    staging_nbytes: int
    has_imports = True
    calls: memoryview  # see `Replayable`; read at each replay
    _buffers: PlanBuffers
    _flags: PinnedFlags
    _has_stream_waits: bool  # on any rank
    _host_routes: Sequence[str] = ()  # of all ranks: all refuse a capture or none does
    _peers: NcclPeers | None = None  # on other nodes, reached by NCCL

    def __init__(self, setup: PlanSetup, chain: StreamChain | None = None) -> None:
        self._comm, self._context, self.name = setup.comm, setup.context, setup.name
        self.agreement = setup.context.agreement
        backend: Any = setup.context.backend
        self._backend, self._device = backend, int(backend.device.ordinal)
        # Others may have made another GPU the current one: JAX does where it finds its GPUs.
        backend.make_current()
        self._chain = StreamChain(backend, setup.name) if chain is None else chain
        self._order: LaunchOrder | None = None  # of kernels that wait

    def _make(self, build: Callable[[], None]) -> None:
        """Share the buffers and `build` launches with them, or free them. Collective."""
        self._flags = self._buffers.flags
        try:
            self._buffers.create()
            self._comm.step(self.name, build)
        except BaseException:
            self._buffers.undo()
            self._close_launches()
            raise
        self.calls, self.staging_nbytes = self._flags.calls, self._buffers.nbytes

    def _join_order(self) -> None:
        """Order the engine's kernels, which wait, with those of others on this GPU."""
        self._order = LaunchOrder.join(self._backend)

    @property
    def chains(self) -> Sequence[StreamChain]:
        """The order of replays of captured calls: see `Replayable`."""
        return [self._chain] if self._order is None else [self._chain, self._order.chain]

    @property
    def nccl(self) -> NcclRanks | None:
        return None if self._peers is None else self._peers.ranks

    @property
    def abort(self) -> int:
        return self._flags.abort

    def _enter(self, call: str, fields: Sequence[Any], stream: Any) -> StreamInfo:
        """Return the stream of a call, which is that of the capture if this thread captures."""
        if stream is None:
            stream = current_stream(fields, self._device)
        entered: StreamInfo = self._backend.enter(stream)
        *_, is_captured = entered
        if not is_captured:
            recording.require_none(f"{self.name}: {call}", "its stream is not the captured one")
        elif self._host_routes:
            raise UnsupportedError(
                f"{self.name}: {call} failed: the stream is being captured into a graph, and the "
                f"routes {self._host_routes} need the host at every call. Call it outside of the "
                "capture, or refuse these routes with require=."
            )
        return entered

    def _record(self) -> None:
        """Record a captured call: every replay makes it again."""
        captured_by = recording.current()
        if captured_by is None:
            if self.nccl is not None:
                self.nccl.is_in_foreign_graphs = True
            return
        if captured_by.is_loop and self._has_stream_waits:
            raise recording.NoLoopError(
                f"{self.name} needs waits of streams: ranks share a GPU without MPS, "
                "or GPUs cannot reach each other"
            )
        captured_by.add(self)

    def _follow(self, entered: StreamInfo) -> None:
        """Let a call come after the last one of the plan, or record it if it is captured."""
        handle, owner, stays_alive, is_captured = entered
        if is_captured:
            self._record()
        else:
            self._chain.follow(handle, owner, stays_alive=stays_alive)

    def _launch_in_order(
        self, launch: GraphCache, entered: StreamInfo, addresses: tuple[int, ...]
    ) -> None:
        """Enqueue a launch: after the last one of any plan on this GPU, if its kernels wait."""
        handle, _, _, is_captured = entered
        self._in_order(lambda: launch.enqueue(handle, addresses, is_captured=is_captured), entered)

    def _in_order(self, enqueue: Callable[[], None], entered: StreamInfo) -> None:
        """Enqueue what waits for other ranks, after the last such work on this GPU."""
        if self._order is not None:
            self._order.begin(entered)
        enqueue()
        if self._order is not None:
            self._order.end(entered)

    def _leave(self, entered: StreamInfo) -> None:
        _, _, stays_alive, is_captured = entered
        if not (stays_alive or is_captured):
            self._chain.leave()

    def is_captured(self, fields: Sequence[Any], stream: Any) -> bool:
        return is_captured(fields, stream, self._backend)

    def pending(self) -> list[int]:
        return self._flags.pending()

    def is_over(self) -> bool:
        """Whether all calls have ended here, and the others have read what was packed for them.

        Replays of a user's graph are not seen.
        """
        return self._chain.is_over() and self._flags.are_read()

    def _progress(self) -> tuple[int, bool]:
        raise NotImplementedError

    def check_elsewhere(self) -> None:
        if self._peers is not None:
            self._peers.check(self._progress())

    def late_elsewhere(self, call: str) -> Exception | None:
        return None if self._peers is None else self._peers.late(call, self._progress())

    def drain(self) -> None:
        self._context.drain(f"{self.name}: close")

    def release(self) -> None:
        self.calls = NO_WORDS  # so that no step replays them
        self._buffers.release()

    def close(self) -> None:
        self._close_launches()
        self._buffers.close()
        self._chain.end()
        if self._order is not None:
            self._order.leave()

    def _close_launches(self) -> None:
        raise NotImplementedError

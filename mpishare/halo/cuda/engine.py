"""Moves the cells of fields in GPU memory: routes ``fused``, ``copy``, ``pinned`` and ``mpi``."""

from __future__ import annotations

import functools
import operator
import os
import time
from typing import TYPE_CHECKING, Any

from mpishare.errors import CudaError, UnsupportedError
from mpishare.halo.cuda.fast_path import quick_of
from mpishare.halo.cuda.fields import addresses, current_stream
from mpishare.halo.cuda.fused import Fused, GraphCache, LaunchOrder
from mpishare.halo.cuda.resources import PlanResources
from mpishare.halo.cuda.streamed import StreamedRoutes
from mpishare.halo.cuda.work_items import natural
from mpishare.halo.layout import require_number
from mpishare.ordering.stream_chain import StreamChain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.halo.engine import PlanSetup
    from mpishare.halo.message import Message

_WIDEST = 15


def _never(fields: Sequence[Any], stream: Any) -> bool:  # noqa: ARG001  as `quick_of`
    """Take no call."""
    return False


class CudaEngine:
    """One direction of one plan on CUDA. Collective, host-blocking.

    Parameters
    ----------
    setup, sends, recvs, is_reverse
        As `HostEngine`.
    """

    def __init__(
        self,
        setup: PlanSetup,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        *,
        is_reverse: bool,
    ) -> None:
        ranks, name = setup.comm, setup.name
        self._context = ranks.context
        self._agreement = ranks.context.agreement
        self._name = name
        backend: Any = ranks.context.backend
        self._backend = backend
        self._layouts = setup.mine
        self._device = backend.device.ordinal
        self._resources = resources = PlanResources(setup, sends, recvs, is_reverse=is_reverse)
        self._words = resources.words
        self._naturals = [natural(each) for each in self._layouts]
        # For fields of which all begin at a multiple of the widest unit, and for others.
        self._relays: list[StreamedRoutes] = []
        self._fuseds: list[Fused] = []
        self._events: list[Any] = []
        self._stream = 0

        def build() -> None:
            resources.prepare()
            self._stream = int(backend.new_stream())
            self._events += [backend.local_event(), backend.local_event()]
            resources.warm()
            for most in ([_WIDEST + 1] * len(self._layouts), self._naturals):
                if resources.is_relayed:
                    self._relays.append(StreamedRoutes(resources, most))
                if resources.has_fused:
                    self._fuseds.append(Fused(resources, most, self._stream))
            resources.load()

        try:
            ranks.step(name, build)
        except BaseException:
            self._close_launches()
            resources.undo(name)
            raise
        self._forked, self._joined = self._events
        self.staging_nbytes = resources.staging_nbytes
        # One for both directions of the plan.
        setup.chain = self._chain = setup.chain or StreamChain(backend, name)
        self._turns = LaunchOrder.on(backend) if resources.has_fused else None
        # Of all ranks, so that all refuse a capture or none.
        used = {route for each in setup.routes for route in each.values()}
        self._on_host = sorted(used & {"pinned", "mpi"})
        # Where the whole exchange is one graph, those that there are.
        self._graphs: dict[Any, int] = {}
        self.try_fast: Callable[[Sequence[Any], Any], bool] = _never
        if self._turns is not None and not resources.is_relayed:
            for fused in self._fuseds:
                fused.alone.told = self._graphs
            known = self._layouts, self._graphs, self._agreement, self._chain, self._turns
            self.try_fast = quick_of(*known, self._words, backend, name)

    def prepare(self, fields: Sequence[Any]) -> list[Any]:
        """Return the fields of a call, once they are known to fit; they are held by that."""
        require_number(fields, len(self._layouts))
        places = addresses(fields, self._layouts)
        way = 0
        if functools.reduce(operator.or_, places) & _WIDEST:
            way = 1
            for place, unit in zip(places, self._naturals, strict=True):
                if place % unit:
                    raise ValueError(f"a field begins at {place:#x}, no multiple of {unit} bytes")
        return [fields, places, way]

    def start(self, arrays: list[Any], stream: Any) -> None:
        """Let my cells go; fused neighbors are served beside the user's stream, ghosts and all."""
        number, _, is_kept, is_captured = self._begin("start", arrays, stream)
        _, places, way = arrays
        if self._fuseds:
            # Not on the user's stream, whose work on the interior would wait for the neighbors.
            self._backend.record(self._forked, number)
            self._backend.wait_event(self._forked, self._stream)
            ways = self._fuseds[way].beside
            # It lives as long as the plan, and a plan that is closed leaves nothing under way.
            entered = self._stream, self, True, is_captured
            self._enqueue(ways, entered, places)
        self._words.calls[0] += 1
        if not is_kept:
            self._chain.leave()

    def wait(self, arrays: list[Any], stream: Any) -> None:
        """Take what came, and let the user's stream go on after the plan's."""
        number, _, is_kept, _ = self._enter("wait", arrays, stream)
        if self._fuseds:
            self._backend.record(self._joined, self._stream)
            self._backend.wait_event(self._joined, number)
        self._end(arrays, number, is_kept=is_kept)

    def exchange(self, arrays: list[Any], stream: Any) -> None:
        """Do both on the user's stream."""
        entered = self._begin("exchange", arrays, stream)
        _, places, way = arrays
        if self._fuseds:
            self._enqueue(self._fuseds[way].alone, entered, places)
        self._words.calls[0] += 1
        self._end(arrays, entered[0], is_kept=entered[2])

    def is_captured(self, fields: Sequence[Any], stream: Any) -> bool:
        """Whether the stream of a call is being captured into a graph. Local."""
        stream = current_stream(fields, self._device) if stream is None else stream
        return bool(self._backend.enter_any(stream)[3])

    def pending(self) -> list[int]:
        """Ranks of the node that have called less often than this one. Local."""
        return self._words.pending()

    def leave(self, until: float) -> None:
        """Wait until then for what was begun, which neighbors are owed, and tell them. Local.

        What replays of a user's graph have begun is not seen. By polling, since a process that ends
        can start no thread.
        """
        try:
            while not (self._chain.is_over() and self._backend.is_done(self._stream)):
                if self._agreement.failure is not None or time.monotonic() > until:
                    return
                os.sched_yield()
        except CudaError:
            return  # a GPU that failed brings nothing to its end
        self._words.finish()

    def drain(self) -> None:
        """Wait until nothing is under way on this rank, with the deadline."""
        self._context.drain(f"{self._name}: close")

    def release(self) -> None:
        """Let go of what this rank imported. Local."""
        self._resources.release()

    def close(self) -> None:
        """Free what this rank owns. Local, once all have released."""
        self._graphs.clear()
        self._close_launches()
        self._resources.close()
        self._chain.end()
        if self._turns is not None:
            self._turns.leave()

    def _close_launches(self) -> None:
        for fused in self._fuseds:
            fused.close()
        self._backend.close_events(self._events)
        if self._stream:
            self._backend.close_stream(self._stream)

    def _begin(self, call: str, arrays: list[Any], stream: Any) -> tuple[int, Any, bool, bool]:
        """Enter, and let go what is relayed."""
        entered = self._enter(call, arrays, stream)
        _, places, way = arrays
        if self._relays:
            self._relays[way].start(entered[0], places)
        return entered

    def _end(self, arrays: list[Any], number: int, *, is_kept: bool) -> None:
        """Take what is relayed, and leave."""
        _, places, way = arrays
        if self._relays:
            self._relays[way].wait(number, places)
        if not is_kept:
            self._chain.leave()

    def _enqueue(
        self, ways: GraphCache, entered: tuple[int, Any, bool, bool], places: tuple[int, ...]
    ) -> None:
        number, owner, is_kept, is_captured = entered
        turns = self._turns
        if is_captured or turns is None or turns.plans == 1:
            ways.enqueue(number, places, is_captured=is_captured)
        else:
            turns.chain.follow(number, owner, is_kept=is_kept)
            ways.enqueue(number, places, is_captured=False)
            if not is_kept:
                turns.chain.leave()

    def _enter(self, call: str, arrays: list[Any], stream: Any) -> tuple[int, Any, bool, bool]:
        """Return the stream, its owner, whether it need not be remembered, and is captured."""
        backend = self._backend
        if stream is None:
            stream = current_stream(arrays[0], self._device)
        number, owner, is_kept, is_captured = backend.enter_any(stream)
        if not is_captured:
            self._chain.follow(number, owner, is_kept=is_kept)
        elif self._on_host:
            raise UnsupportedError(
                f"{self._name}: {call} failed: the stream is being captured into a graph, and "
                f"neighbors by the routes {self._on_host} are served by the host. "
                "Call it outside of the capture, or refuse these routes with require=."
            )
        return number, owner, is_kept or is_captured, is_captured

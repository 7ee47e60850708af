"""The live probe: every pair of ranks tries to share memory and counters once.

Asking the driver whether something should work is not enough: containers, control groups and
drivers lie. A failure here is data for the report, not an error.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.backends.suballocator import CHUNK_NBYTES
from mpishare.coordination.counters import RELEASED, SLOT_WORDS
from mpishare.coordination.poll import poll
from mpishare.errors import CudaError
from mpishare.memory.handle import Handle
from mpishare.runtime.places import Probed
from mpishare.runtime.report import Pair
from mpishare.runtime.route import between

if TYPE_CHECKING:
    from mpishare.memory.memory import Memory
    from mpishare.runtime.context import NodeContext

_CALL = "Node: probe"
_NBYTES = 4096  # used, of a chunk
_COUNTERS_S = 20.0

Outcome = dict[str, Any]


def probe_cuda(context: NodeContext) -> Probed:
    """Try every pair of ranks of a CUDA node.

    Collective, host-blocking: 10 to 100 ms, most of it for mapping memory of other GPUs. The pairs
    have no routes yet.
    """
    from mpishare.backends import driver

    prober = _Prober(context)
    seen = prober.run()
    device = context.backend.device
    links = context.agreement.step(
        _CALL,
        lambda: [
            driver.link(device.ordinal, uuid) if device is not None else ""
            for uuid in context.uuids
        ],
    )
    pairs = []
    for origin, target in product(range(context.size), repeat=2):
        as_origin, as_target = seen[origin]["origin"][target], seen[target]["target"][origin]
        observed = as_target | as_origin
        observed["reason"] = as_origin["reason"] or as_target["reason"]
        link = "self" if origin == target else links[origin][target]
        pairs.append(Pair(origin=origin, target=target, link=link, route="", **observed))
    return Probed(context.uuids, tuple(pairs))


def routed(pair: Pair, *, is_time_sliced: bool) -> Pair:
    """Return a pair of a CUDA node with its route."""
    has_memory, is_self = pair.memory and pair.copy, pair.origin == pair.target
    return replace(pair, route=between(has_memory, is_self=is_self, is_time_sliced=is_time_sliced))


class _Prober:
    def __init__(self, context: NodeContext) -> None:
        self.context = context
        self.backend: Any = context.backend
        self.rank, self.size = context.rank, context.size
        self.origin: list[Outcome] = [{"memory": False, "reason": None} for _ in range(self.size)]
        self.target: list[Outcome] = [
            {"copy": False, "kernel": False, "counters": False, "reason": None}
            for _ in range(self.size)
        ]
        self.memories: list[Memory | None] = [None] * self.size
        self.tokens: list[str] = [""] * self.size

    def run(self) -> list[dict[str, Any]]:
        """Return the observations of every rank, by rank."""
        step = self.context.agreement.step
        counters = self.context.take_counters(_CALL, SLOT_WORDS * self.size)
        try:
            step(_CALL, self._create)
            replies = step(_CALL, self._publish)
            step(_CALL, lambda: self._open(replies))
            step(_CALL, self._write)
            step(_CALL, self._look)
            step(_CALL, lambda: self._count(counters.view, counters.address))
            return step(_CALL, lambda: {"origin": self.origin, "target": self.target})
        finally:
            # After a failure too: every rank comes here, unless the node itself is broken.
            self.context.begin_close(_CALL)
            self.context.close_in_order(_CALL, self._let_go, lambda _: self._free(), [counters])

    def _create(self) -> None:
        memory = self.memories[self.rank] = self.backend.allocate(CHUNK_NBYTES)
        memory.array((_NBYTES // 8,), "u8").fill(0)
        self.context.synchronize(None, _CALL)

    def _publish(self) -> dict[str, Any]:
        memory = self.memories[self.rank]
        if memory is None:
            return {}
        token = self.backend.publish(memory)
        return {"handle": self.context.handle(token, 0, _NBYTES, memory.nbytes)}

    def _open(self, replies: list[dict[str, Any]]) -> None:
        for rank in range(self.size):
            if rank == self.rank:
                self.origin[rank]["memory"] = True
                continue
            try:
                handle = Handle.unpack(replies[rank]["handle"])
                memory = self.backend.open(handle.token, handle.capacity, handle.uuid)
                self.memories[rank], self.tokens[rank] = memory, handle.token
                self.origin[rank]["memory"] = True
            except CudaError as error:
                self.origin[rank]["reason"] = str(error)

    def _write(self) -> None:
        from mpishare.backends import cuda

        for rank, memory in enumerate(self.memories):
            if memory is None:
                continue
            theirs = memory.array((2 * self.size,), "u8")
            value = self.backend.xp.full(1, _mark(self.rank, rank), dtype="u8")
            place = theirs[2 * self.rank : 2 * self.rank + 1]
            place.data.copy_from_device_async(value.data, 8)
            cuda.store(theirs[2 * self.rank + 1 :], _mark(self.rank, rank))
            self.context.synchronize(None, _CALL)

    def _look(self) -> None:
        memory = self.memories[self.rank]
        if memory is None:
            return
        found = memory.array((2 * self.size,), "u8").get()
        for rank, outcome in enumerate(self.target):
            outcome["copy"] = int(found[2 * rank]) == _mark(rank, self.rank)
            outcome["kernel"] = int(found[2 * rank + 1]) == _mark(rank, self.rank)
            if not (outcome["copy"] and outcome["kernel"]):
                outcome["reason"] = "what this rank stored did not arrive"

    def _count(self, view: memoryview[int], address: int) -> None:
        slots = [address + 8 * SLOT_WORDS * rank for rank in range(self.size)]
        operations = [("write", slots[self.rank])] + [("wait", slot) for slot in slots]
        try:
            signals = self.backend.signals(operations)
            signals.enqueue(self._stream(), [1] * len(operations))
        except CudaError as error:
            for outcome in self.target:
                outcome["reason"] = str(error)
            return
        pending = self._pending(view)
        if pending:
            # One store of the CPU lets the blocked stream go on.
            for rank in pending:
                view[SLOT_WORDS * rank] = RELEASED
            self.context.synchronize(None, _CALL)
        for rank, outcome in enumerate(self.target):
            outcome["counters"] = rank not in pending
            if rank in pending:
                outcome["reason"] = "a counter written by this rank's stream did not arrive"

    def _pending(self, view: memoryview[int]) -> list[int]:
        """Wait for the counters of all ranks; return those that did not come in time."""
        stream = self._stream()
        poll(lambda: self.backend.is_done(stream), _COUNTERS_S, self.context.agreement.check)
        # The counters decide in any case: another rank may have released them after a failure of
        # its own.
        return [rank for rank in range(self.size) if view[SLOT_WORDS * rank] != 1]

    def _let_go(self) -> None:
        """Keep the memory mapped for the plans to come."""
        for rank, memory in enumerate(self.memories):
            if rank != self.rank and memory is not None:
                self.context.suballocator.adopt_opened(memory, self.tokens[rank])

    def _free(self) -> None:
        memory = self.memories[self.rank]
        if memory is not None:
            self.context.suballocator.adopt(memory, self.backend.publish(memory))

    def _stream(self) -> int:
        return int(self.backend.stream(None)[0])


def _mark(origin: int, target: int) -> int:
    # Different for every pair, and not a pattern that memory holds by chance.
    return int(np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(origin << 32 | target << 8 | 0xA5))

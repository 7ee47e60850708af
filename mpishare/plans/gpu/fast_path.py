"""Fast path: calls that replay the cached CUDA graph of known fields by one launch."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

import cupy

from mpishare.backends.cuda import LAST_DEFAULT
from mpishare.backends.driver import launch_graph
from mpishare.coordination.mpi_agreement import never_free
from mpishare.coordination.recording import UNDER_WAY
from mpishare.plans.gpu.seen import SeenArrays

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mpishare.coordination.agreement import Agreement
    from mpishare.plans.gpu.flags import PinnedFlags
    from mpishare.plans.gpu.launch_order import LaunchOrder
    from mpishare.plans.layout import FieldLayout
    from mpishare.plans.mpi_route import MpiMessages
    from mpishare.windows.stream_chain import StreamChain


CUDA_ERROR = cupy.cuda.runtime.CUDARuntimeError
CURRENT_STREAM, CURRENT_DEVICE = cupy.cuda.get_current_stream, cupy.cuda.runtime.getDevice
IS_CAPTURING = cupy.cuda.runtime.streamIsCapturing


class ByMessages:
    """Lookup of replays by MPI messages alone: in place, or packed and unpacked by graphs."""

    def __init__(
        self,
        packs: Mapping[Any, int],
        unpacks: Mapping[Any, int],
        in_place: Mapping[Any, MpiMessages | None],
    ) -> None:
        self._packs, self._unpacks, self._in_place = packs, unpacks, in_place

    def get(self, key: Any) -> MpiMessages | tuple[int, int] | None:
        """Return the messages in place, else both graphs, else None."""
        messages = self._in_place.get(key)
        if messages is not None:
            return messages
        pack, unpack = self._packs.get(key), self._unpacks.get(key)
        return None if pack is None or unpack is None else (pack, unpack)


class BesideFused:
    """Lookup of replays by the fused kernel on the plan's own stream, with messages beside it."""

    def __init__(self, graphs: Mapping[Any, int], messages: ByMessages) -> None:
        self._graphs, self._messages = graphs, messages

    def get(self, key: Any) -> tuple[int, MpiMessages | tuple[int, int]] | None:
        """Return the kernel's graph and the replay of the messages, if both are cached."""
        graph, messages = self._graphs.get(key), self._messages.get(key)
        return None if graph is None or messages is None else (graph, messages)


class _Alone:
    """The launch order of a plan without kernels that wait."""

    plans = 1
    chain: Any = None


class FastPath:
    """Calls by one graph launch, for plans whose exchange is one graph, or two.

    Python takes longer to check a call than the GPU takes to run it. So a call is only compared
    with the last one: CuPy arrays of the same layouts, on the same stream, with no other plan's
    launch between. Other calls take the slow path. Arrays without a graph, such as new ones, are
    passed to `first`, which launches the kernel, or returns False for the slow path. `own` is the
    plan's stream; 0: that of the call.
    """

    def __init__(
        self,
        layouts: Sequence[FieldLayout],
        handles: Mapping[Any, int] | ByMessages | BesideFused,
        chain: StreamChain,
        order: LaunchOrder | None,
        first: Callable[[tuple[int, ...], int], bool],
        enqueue: Callable[[Any, int, str], None] = launch_graph,
        own: int = 0,
    ) -> None:
        self._seen = [SeenArrays(layout) for layout in layouts]
        self._handles = handles
        self._chain = chain
        self._order = _Alone if order is None else order
        self._launch_first, self._enqueue, self._own = first, enqueue, own

    def bind(
        self, agreement: Agreement, flags: PinnedFlags
    ) -> Callable[[Sequence[Any], Any], bool]:
        """Return the function that replays the graph of a call, or returns False.

        A closure: each attribute lookup would take 1 % of the call.
        """
        first, *others = self._seen
        count, handles, chain, order = len(self._seen), self._handles, self._chain, self._order
        known, lookup = first.known, first.lookup
        launch_first, enqueue, own = self._launch_first, self._enqueue, self._own
        where, device = chain.name, first.device
        # `CudaBackend.is_current`, inlined: calling it would add 50 %.
        current, is_capturing = CURRENT_STREAM, IS_CAPTURING

        def replay(fields: Sequence[Any], stream: Any) -> bool:
            if stream is not None or len(fields) != count or UNDER_WAY:
                return False
            field = fields[0]
            found = known.get(id(field))
            if found is not None and found[0]() is field and found[1] == field.shape:
                key: Any = found[2]
            else:
                key = lookup(field)
                if key is None:
                    return False
            if others:  # apart from the first: a loop over one field would double the time
                key = [key]
                for field, seen in zip(fields[1:], others, strict=True):
                    found = seen.known.get(id(field))
                    if found is not None and found[0]() is field and found[1] == field.shape:
                        key.append(found[2])
                    else:
                        key.append(seen.lookup(field))
                if None in key:
                    return False
                key = tuple(key)
            graph = handles.get(key)
            if agreement.failure is not None or agreement.thread != get_ident():
                return False
            handle = chain.handle
            if handle is None or not chain.stays_alive:
                return False
            try:
                if current(device).ptr != handle or is_capturing(handle):
                    return False
            except CUDA_ERROR:
                return False
            if handle <= LAST_DEFAULT and CURRENT_DEVICE() != device:
                return False
            if order.plans > 1 and (
                (own or handle) != order.chain.handle or not order.chain.stays_alive
            ):
                return False
            if graph is not None:
                flags.calls[0] += 1  # first, since messages are waited for
                try:
                    enqueue(graph, handle, where)
                except BaseException:
                    never_free(fields)  # a message may still arrive
                    raise
                return True
            if not launch_first(key if others else (key,), handle):
                return False
            flags.calls[0] += 1
            return True

        return replay


def bind_wait(
    chain: StreamChain, agreement: Agreement, enqueue: Callable[[int], None]
) -> Callable[[Any], bool]:
    """Return the function that completes a start on the same stream, or returns False."""
    is_current = chain.is_current

    def join(stream: Any) -> bool:
        handle = chain.handle
        if stream is not None or handle is None or not chain.stays_alive or UNDER_WAY:
            return False
        if agreement.failure is not None or agreement.thread != get_ident():
            return False
        if not is_current(handle):
            return False
        enqueue(handle)
        return True

    return join

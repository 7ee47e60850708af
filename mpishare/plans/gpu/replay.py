"""Replay: calls that launch the cached CUDA graph of known arrays, where little has changed.

Python takes longer to check a call than the GPU takes to run it. So a call is only compared with
the last one: the same stream, no other plan's launch between, CuPy arrays of the same layouts. The
functions below are closures, since each attribute lookup would take 1 % of the call; they return
False, with nothing done, for calls that need the slow path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

import cupy

from mpishare.backends.cuda import LAST_DEFAULT
from mpishare.backends.driver import launch_graph
from mpishare.coordination.mpi_agreement import never_free
from mpishare.coordination.recording import UNDER_WAY
from mpishare.plans.gpu.seen import SeenArrays

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpishare.coordination.agreement import Agreement
    from mpishare.device.launch_order import LaunchOrder
    from mpishare.plans.gpu.flags import PinnedFlags
    from mpishare.plans.layout import FieldLayout
    from mpishare.plans.mpi_route import MpiMessages
    from mpishare.windows.stream_chain import StreamChain


_CUDA_ERROR = cupy.cuda.runtime.CUDARuntimeError
_CURRENT_STREAM, _CURRENT_DEVICE = cupy.cuda.get_current_stream, cupy.cuda.runtime.getDevice
_IS_CAPTURING = cupy.cuda.runtime.streamIsCapturing

FastCall = Callable[[Sequence[Any], Any], bool]
"""Called with the arrays and the ``stream=`` of a call."""


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


def _never(addresses: tuple[int, ...], stream: int) -> bool:  # noqa: ARG001
    return False


def bind_last_stream(
    chain: StreamChain,
    agreement: Agreement,
    device: int | None,
    order: LaunchOrder | None = None,
    own: int = 0,
) -> Callable[[], int | None]:
    """Return a function of the stream of the last call, None where this call may not follow it.

    It may if that stream is the current one, and is not being captured; if the node is whole, and
    the thread its own; and if `order` has the launch after the last one on the same stream: the
    plan's `own`, or that of the calls for 0.
    """
    # `CudaBackend.is_current`, inlined: calling it would take 3 % of a call.
    current, is_capturing = _CURRENT_STREAM, _IS_CAPTURING
    ordered: Any = _Alone if order is None else order

    def last_stream() -> int | None:
        handle = chain.handle
        if handle is None or not chain.stays_alive or UNDER_WAY:
            return None
        if agreement.failure is not None or agreement.thread != get_ident():
            return None
        try:
            if current(device).ptr != handle or is_capturing(handle):
                return None
        except _CUDA_ERROR:
            return None
        if handle <= LAST_DEFAULT and _CURRENT_DEVICE() != device:
            return None
        if ordered.plans > 1:
            last = ordered.chain
            if (own or handle) != last.handle or not last.stays_alive:
                return None
        return handle

    return last_stream


def bind_replay(
    layouts: Sequence[FieldLayout],
    handles: Mapping[Any, int] | ByMessages | BesideFused,
    last_stream: Callable[[], int | None],
    flags: PinnedFlags,
    where: str,
    first: Callable[[tuple[int, ...], int], bool] = _never,
    enqueue: Callable[[Any, int, str], None] = launch_graph,
) -> FastCall:
    """Return the replay of a plan whose call is one graph, or two.

    Arrays without a graph, such as new ones, are passed to `first`, which launches the kernel, or
    returns False for the slow path.
    """
    seen = [SeenArrays(layout) for layout in layouts]
    count, known, lookup = len(seen), seen[0].known, seen[0].lookup

    def replay(fields: Sequence[Any], stream: Any) -> bool:
        if stream is not None or len(fields) != count:
            return False
        key: Any
        if count == 1:  # apart: a loop over one array would double the time
            field = fields[0]
            found = known.get(id(field))
            if found is not None and found[0]() is field and found[1] == field.shape:
                key = found[2]
            else:
                key = lookup(field)
        else:
            key = _key_of(fields, seen)
        handle = None if key is None else last_stream()
        if handle is None:
            return False
        graph = handles.get(key)
        if graph is None:
            if not first((key,) if count == 1 else key, handle):
                return False
            flags.calls[0] += 1
            return True
        flags.calls[0] += 1  # first, since messages are waited for
        try:
            enqueue(graph, handle, where)
        except BaseException:
            never_free(fields)  # a message may still arrive
            raise
        return True

    return replay


def _key_of(fields: Sequence[Any], seen: Sequence[SeenArrays]) -> tuple[int, ...] | None:
    """Return the addresses of several arrays; None if one has another layout."""
    key = []
    for field, each in zip(fields, seen, strict=True):
        found = each.known.get(id(field))
        if found is not None and found[0]() is field and found[1] == field.shape:
            key.append(found[2])
        elif (address := each.lookup(field)) is not None:
            key.append(address)
        else:
            return None
    return tuple(key)


def bind_replay_of_one(
    layout: FieldLayout,
    handles: Mapping[Any, int],
    last_stream: Callable[[], int | None],
    flags: PinnedFlags,
    where: str,
) -> Callable[[Any, Any], bool]:
    """Return the replay of a plan of one array, for calls with the array itself.

    The array may have another shape by now: its elements have not moved.
    """
    seen = SeenArrays(layout)
    known, lookup = seen.known, seen.lookup

    def replay(array: Any, stream: Any) -> bool:
        if stream is not None:
            return False
        found = known.get(id(array))
        if found is None or found[0]() is not array:
            graph = handles.get(lookup(array))
        else:
            graph = handles.get(found[2])
        handle = None if graph is None else last_stream()
        if graph is None or handle is None:
            return False
        launch_graph(graph, handle, where)
        flags.calls[0] += 1
        return True

    return replay


def bind_wait(
    last_stream: Callable[[], int | None], enqueue: Callable[[int], None]
) -> Callable[[Any], bool]:
    """Return the function that completes a start on the same stream, or returns False."""

    def join(stream: Any) -> bool:
        handle = None if stream is not None else last_stream()
        if handle is None:
            return False
        enqueue(handle)
        return True

    return join

"""Replay: calls that launch the cached CUDA graph of known arrays, where little has changed.

Python takes longer to check a call than the GPU takes to run it. So a call is only compared with
the last one: the same stream, no other plan's launch between, arrays of the same layouts, of CuPy
or of PyTorch. The functions below are closures, since each attribute lookup would take 1 % of the
call; they return False, with nothing done, for calls that need the slow path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from threading import get_ident
from typing import TYPE_CHECKING, Any
from weakref import ref

import cupy

from mpishare.backends import driver
from mpishare.coordination.recording import UNDER_WAY
from mpishare.plans.gpu.graphs import key_of
from mpishare.plans.gpu.tensors import TensorAddresses, current_stream

if TYPE_CHECKING:
    from mpishare.coordination.agreement import Agreement
    from mpishare.plans.gpu.flags import PinnedFlags
    from mpishare.plans.layout import FieldLayout
    from mpishare.runtime.launch_order import LaunchOrder
    from mpishare.runtime.stream_chain import StreamChain


FastCall = Callable[[Sequence[Any], Any], bool]
"""Called with the arrays and the ``stream=`` of a call."""

LastStream = Callable[..., "int | None"]
"""See `bind_last_stream`."""

_Array = cupy.ndarray
_RuntimeError = cupy.cuda.runtime.CUDARuntimeError
_layout_of = attrgetter("shape", "strides", "dtype")
_layout_of_empty = attrgetter("shape", "dtype")  # whose strides are any
_MAX_SEEN = 64
_Seen = tuple[Callable[[], Any], tuple[int, ...], int]  # a weak reference, the shape, the address
_NOT_SEEN: _Seen = object, (), 0  # refers to a new object at each call, so to no array


class SeenArrays:
    """The addresses of the CuPy arrays of one layout among the arguments of earlier calls.

    Reading an address from CuPy costs as much as a launch. `known` is by id, which may be reused
    once its array is gone: compare the referent. An array keeps its memory, dtype and device; its
    shape may be set.
    """

    def __init__(self, layout: FieldLayout) -> None:
        self._layout_of = _layout_of_empty if 0 in layout.shape else _layout_of
        self._layout = self._layout_of(layout)
        self.device = layout.device
        self.known: dict[int, _Seen] = {}

    def lookup(self, array: Any) -> int | None:
        """Return the address of an array that is not cached yet; None for another layout."""
        if type(array) is not _Array or self._layout_of(array) != self._layout:
            return None
        memory = array.data
        if memory.device_id != self.device:
            return None
        if len(self.known) >= _MAX_SEEN:
            self.known.clear()
        address: int = memory.ptr
        self.known[id(array)] = ref(array), self._layout[0], address
        return address


class _Alone:
    """The launch order of a plan without kernels that wait."""

    plans = 1
    chain: Any = None


def never(*_: Any) -> bool:
    """Take the slow path."""
    return False


def bind_last_stream(
    chain: StreamChain,
    agreement: Agreement,
    order: LaunchOrder | None = None,
    own: int = 0,
) -> LastStream:
    """Return a function of the stream of the last call, None where this call may not follow it.

    It may if that stream is the current one, of CuPy or of PyTorch, and is not being captured; if
    the node is whole, and the thread its own; and if `order` has the launch after the last one on
    the same stream: the plan's `own`, or that of the calls for 0.
    """
    is_current = chain.is_current
    ordered: Any = order or _Alone
    life = agreement.life

    # Of PyTorch if `tensors_on`, its device, is given. Calls with keywords would take 1 % longer.
    def last_stream(tensors_on: int | None = None) -> int | None:
        handle = chain.lasting
        if handle is None or UNDER_WAY:
            return None
        if life.failure is not None or agreement.thread != get_ident():
            return None
        if not is_current(handle, None if tensors_on is None else current_stream(tensors_on)):
            return None
        if ordered.plans > 1 and ordered.chain.lasting != (own or handle):
            return None
        return handle

    return last_stream


def bind_replay(
    layouts: Sequence[FieldLayout],
    find: Callable[[Any], Any],
    last_stream: LastStream,
    flags: PinnedFlags,
    where: str,
    first: Callable[[Any, int], bool] = never,
    enqueue: Callable[[Any, int], None] = driver.graph_launch,
    *,
    with_tensors: bool = True,
) -> FastCall:
    """Return the replay of a plan whose call is what `find` has for the `key_of` its arrays.

    The keys of arrays without it, such as new ones, are passed to `first`, which makes the call, or
    returns False for the slow path. Without tensors where a later call that is given no arrays is
    made on the stream of their library.
    """
    seen = [*map(SeenArrays, layouts)]
    of_tensors = _bind_tensors(layouts, last_stream, with_tensors=with_tensors)
    count, known, lookup = len(seen), seen[0].known, seen[0].lookup
    key_of_all = _bind_keys(seen)

    def replay(fields: Sequence[Any], stream: Any) -> bool:
        if stream is not None or len(fields) != count:
            return False
        key: Any
        if count == 1:  # apart: a loop over one array would double the time
            field = fields[0]
            found = known.get(id(field), _NOT_SEEN)
            is_known = found[0]() is field and found[1] == field.shape
            key = found[2] if is_known else lookup(field)
        else:
            key = key_of_all(fields)
        if key is None:
            key, handle = of_tensors(fields)
        else:
            handle = last_stream()
        if handle is None:
            return False
        graph = find(key)
        if graph is None:
            return first(key, handle)
        try:  # as `launch_graph`, without a call
            enqueue(graph, handle)
        except _RuntimeError as failure:
            raise driver.error("cudaGraphLaunch", failure.status, where) from None
        flags.calls[0] += 1
        return True

    return replay


def _bind_tensors(
    layouts: Sequence[FieldLayout], last_stream: LastStream, *, with_tensors: bool
) -> Callable[[Sequence[Any]], tuple[Any, int | None]]:
    """Return the function of tensors to their key and stream, both None for the slow path."""
    addresses_of = TensorAddresses(layouts if with_tensors else ()).of
    device = layouts[0].device

    def of_tensors(fields: Sequence[Any]) -> tuple[Any, int | None]:
        if (addresses := addresses_of(fields)) is None:
            return None, None
        return key_of(addresses), last_stream(device)

    return of_tensors


def _bind_keys(
    seen: Sequence[SeenArrays],
) -> Callable[[Sequence[Any]], tuple[int, ...] | None]:
    """Return the function of as many arrays to their addresses; to None for another layout."""
    rows = [(each.known.get, each.lookup) for each in seen]
    one, other = rows[0][0], rows[-1][0]

    def key_of_both(fields: Sequence[Any]) -> tuple[int, ...] | None:
        first, second = fields  # apart: a loop would double the time
        a, b = one(id(first), _NOT_SEEN), other(id(second), _NOT_SEEN)
        if a[0]() is first and a[1] == first.shape and b[0]() is second and b[1] == second.shape:
            return a[2], b[2]
        return key_of_all(fields)

    def key_of_all(fields: Sequence[Any]) -> tuple[int, ...] | None:
        key = []
        for (known, lookup), field in zip(rows, fields):  # noqa: B905  counted before
            found = known(id(field), _NOT_SEEN)
            if found[0]() is field and found[1] == field.shape:
                key.append(found[2])
            elif (address := lookup(field)) is not None:
                key.append(address)
            else:
                return None
        return tuple(key)

    return key_of_both if len(rows) == 2 else key_of_all


def bind_replay_of_one(
    layout: FieldLayout,
    handles: dict[Any, int],
    last_stream: LastStream,
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
        found = known.get(id(array), _NOT_SEEN)
        graph = handles.get(found[2] if found[0]() is array else lookup(array))
        if graph is None or (handle := last_stream()) is None:
            return False
        driver.launch_graph(graph, handle, where)
        flags.calls[0] += 1
        return True

    return replay


def bind_wait(last_stream: LastStream, enqueue: Callable[[int], None]) -> Callable[[Any], bool]:
    """Return the function that completes a start on the same stream, or returns False."""

    def join(stream: Any) -> bool:
        if stream is not None or (handle := last_stream()) is None:
            return False
        enqueue(handle)
        return True

    return join

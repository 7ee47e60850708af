"""The engine for fields in GPU memory: the ranks of a node reduce by kernels, in rank order."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import cupy

from mpishare.backends.cuda_streams import borrowed, on_stream
from mpishare.backends.driver import InOrder
from mpishare.backends.nccl import most_captured_alone
from mpishare.errors import UnsupportedError
from mpishare.plans import nccl_choice, routes
from mpishare.plans.gpu.fields import addresses_of, place_of
from mpishare.plans.gpu.plan_engine import CudaPlanEngine
from mpishare.plans.gpu.replay import bind_last_stream, bind_replay, bind_replay_of_one
from mpishare.plans.layout import check_layout
from mpishare.reduction.cuda.group import Buffers, Group, Pointers, PreparedCall
from mpishare.reduction.cuda.records import order_by_strides, shapes_of
from mpishare.reduction.cuda.spinning import SpinningRoute
from mpishare.reduction.operation import packing_order
from mpishare.runtime.route import COPY, FUSED, PINNED, slowest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.backends import StreamInfo
    from mpishare.backends.driver import Enqueued
    from mpishare.plans.engine import PlanSetup
    from mpishare.plans.layout import FieldLayout
    from mpishare.reduction.cuda.nodes import NodesRoute
    from mpishare.reduction.cuda.records import Form
    from mpishare.reduction.exact import ExactOperation
    from mpishare.reduction.operation import Operation
    from mpishare.runtime.route import Route

_MAX_LAYOUTS = 64


class CudaReduce(CudaPlanEngine):
    """Reduces as `HostReduce`, on streams. Collective to make, host-blocking.

    Where ranks take turns of a GPU (`is_staged`), a kernel that waits would use up the turn of the
    rank that it waits for, and streams that wait took 1.4 to 12 times as long as copies through the
    host. There it reduces over this rank alone, and leaves all others to the host.
    """

    _has_stream_waits = False
    try_fast: Callable[[Any, Any], bool]
    combine_words: Callable[[Any, Any], None] | None = None
    _reduce: PreparedCall

    def __init__(
        self,
        setup: PlanSetup,
        layout: FieldLayout,
        operation: Operation,
        exact: ExactOperation | None,
    ) -> None:
        super().__init__(setup)
        comm, name = setup.comm, setup.name
        self._layout, self._dtype = layout, operation.dtype
        replies = comm.step(name, lambda: [_route_to_peers(setup), nccl_choice.ask(setup)])
        # The slowest route between any two ranks serves all of them.
        route = slowest(replies[rank][0] for rank in comm.ranks_here)
        self.is_staged = COPY in (route for route, _ in replies)
        ranks = [comm.rank] if self.is_staged else [*comm.ranks_here]
        self._group = Group(setup, ranks, operation, exact)
        self._count = prod(layout.shape)
        has_nodes = not (comm.is_of_one_node or self.is_staged) and self._count > 0
        self.reaches_nodes = nccl_choice.settle(setup, [each for _, each in replies]) and has_nodes
        self._is_needed = self._count > 0 and (self._group.size > 1 or self.reaches_nodes)
        # Exact sums are rounded once: the host combines those of all ranks, not of nodes.
        is_of_host = self.is_staged or not (comm.is_of_one_node or self.reaches_nodes)
        self._is_apart = exact is not None and is_of_host
        self._is_needed &= not (self._is_apart and operation is exact)
        (shape, form), _ = comm.step_keeping(name, lambda: (self._shape(setup), None))
        self._inner = inner = SpinningRoute(self._group, shape, self._count, form=form)
        self._route: SpinningRoute | NodesRoute = inner
        self._nodes: NodesRoute | None = None
        if self.reaches_nodes:
            from mpishare.reduction.cuda.nodes import NodesRoute

            nodes = NodesRoute(setup, self._group, inner, shape, self._count, form=form)
            self._route = self._nodes = nodes
            self._peers = nodes.peers
        self._buffers: Buffers = Buffers(
            comm,
            name,
            ranks,
            self._route.nbytes,
            in_host_memory=not route.needs_peer_memory,
        )
        self._made: list[PreparedCall] = []
        self._dots: dict[Any, PreparedCall] = {}
        self._last_dot: PreparedCall | None = None
        self._capturing = 0
        self._make(lambda: self._build(with_dot=operation.name == "sum"))
        # A single rank waits for no other.
        if self.reaches_nodes or self._group.size > 1:
            self._join_order()
        self._last_stream = bind_last_stream(self._chain, self.agreement, self._order)
        handles, where = self._reduce.handles, self._chain.name
        self.try_fast = bind_replay_of_one(
            self._layout, handles, self._last_stream, self._flags, where
        )

    def _shape(self, setup: PlanSetup) -> tuple[Any, Form]:
        """Return the record of a field's elements, or raise for too many axes."""
        layout, order = self._layout, packing_order(setup)
        shapes, form = shapes_of(layout.shape, [layout.strides], self._group.itemsize, order)
        return shapes[0], form

    def _build(self, *, with_dot: bool) -> None:
        """Create the stream and the launches of `reduce`, and load all kernels."""
        self._buffers.attach(0)
        route, pointers = self._route, Pointers(1)
        self._capturing = self._group.asides.own = int(self._backend.new_stream())
        route.bind(self._buffers)
        launches = route.warm_up(pointers, with_dot=with_dot)
        if self._is_apart:
            self._words = cupy.zeros(self._group.sum_count, self._group.sums.operation.dtype)
            self._rounded = Pointers(1)
            round_words = self._group.round(self._words.data.ptr, *self._rounded.arguments)
            self._round_words = InOrder(round_words)
        nbytes = self._count * self._group.itemsize
        self._reduce = self._prepared([self._layout], route.reduce(pointers), pointers, nbytes)
        self._made.append(self._reduce)
        self._group.load(0)
        # A kernel that is loaded later would wait for the streams.
        for launch in launches:
            launch.enqueue(0)
        # Until all uploads have arrived and all kernels are loaded.
        self._context.drain(self.name)

    def reduce(self, field: Any, stream: Any) -> None:
        prepared = self._reduce
        fields = (field,)
        addresses = addresses_of(fields, prepared.layouts, "x")
        self._require_aligned(addresses)
        entered = self._enter("reduce", fields, stream)
        if self._is_needed:
            self._enqueue(prepared, addresses, entered)

    def dot(self, x: Any, y: Any, out: Any, stream: Any) -> Any:
        if out is None:
            if not self._is_on_last_stream(x, stream) and self.is_captured([x], stream):
                raise UnsupportedError(
                    f"{self.name}: dot failed: the stream is being captured into a graph, and "
                    "replays would write into a result that may be gone by then. Pass out=, an "
                    "array of one element that you keep"
                )
            out = self._new_result(x, stream)
        last = self._last_dot
        if last is not None and last.try_fast((x, y, out), stream):
            return out
        fields = x, y, out
        addresses, layouts = self._places_of_dot(x, y, out)
        self._require_aligned(addresses)
        prepared = self._dots.get(layouts) or self._prepare_dot(layouts)
        entered = self._enter("dot", fields, stream)
        self._enqueue(prepared, addresses, entered)
        if self.combine_words is None:
            self._last_dot = prepared
            return out
        handle, *_ = entered
        self.combine_words(self._words, handle)
        self._rounded.array[0] = addresses[-1]
        self._round_words.enqueue(handle)
        return out

    def _is_on_last_stream(self, x: Any, stream: Any) -> bool:
        """Whether a call of CuPy's is on the stream of the last one, which is not being captured.

        PyTorch's current stream is another one.
        """
        if stream is not None or type(x) is not cupy.ndarray:
            return False
        last = self._chain.lasting
        return last is not None and self._backend.is_current(last)

    def _new_result(self, x: Any, stream: Any) -> Any:
        """Return a new array of shape (), of the library of x."""
        if hasattr(x, "new_empty"):  # a tensor
            return x.new_empty(())
        if stream is None:
            return cupy.empty((), self._dtype)
        # CuPy reuses memory in the order of the stream on which it was allocated.
        with on_stream(borrowed(self._backend.stream(stream)[0])):
            return cupy.empty((), self._dtype)

    def _places_of_dot(
        self, x: Any, y: Any, out: Any
    ) -> tuple[tuple[int, ...], tuple[FieldLayout, ...]]:
        """Return addresses and layouts of the arrays of a dot product; raise if they do not fit."""
        addresses, found = [], []
        for name, array in (("x", x), ("y", y), ("out", out)):
            address, layout = place_of(array, name, is_written=array is out)
            check_layout(layout, name)
            if layout.dtype != self._dtype:
                raise ValueError(f"{name} has dtype {layout.dtype} instead of {self._dtype}")
            if layout.device != self._device:
                raise ValueError(f"{name} is on GPU {layout.device} instead of {self._device}")
            addresses.append(address)
            found.append(layout)
        of_x, of_y, of_out = found
        if of_x.shape != of_y.shape:
            raise ValueError(f"x has shape {of_x.shape}, y has {of_y.shape}: they must be the same")
        if prod(of_out.shape) != 1:
            raise ValueError(f"out has shape {of_out.shape}: it must be of one element")
        return tuple(addresses), tuple(found)

    def _prepare_dot(self, layouts: tuple[FieldLayout, ...]) -> PreparedCall:
        of_x, of_y, _ = layouts
        extents, strides = order_by_strides(of_x.shape, [of_x.strides, of_y.strides])
        shapes, form = shapes_of(extents, strides, self._dtype.itemsize, "C")
        pointers, count = Pointers(3), prod(of_x.shape)
        enqueued: Enqueued
        if self._is_apart:
            x, y, _ = pointers.arguments
            arrays = [x, y, self._words.data.ptr]
            enqueued = self._inner.local_dot(shapes, arrays, count, form=form)
        else:
            enqueued = self._route.dot(pointers, shapes, count, form=form)
        prepared = self._prepared(layouts, enqueued, pointers, self._group.sum_nbytes)
        where = self._chain.name
        prepared.try_fast = bind_replay(
            layouts, prepared.handles.get, self._last_stream, self._flags, where
        )
        if len(self._dots) == _MAX_LAYOUTS:
            self._dots.pop(next(iter(self._dots))).close()
        self._dots[layouts] = prepared
        return prepared

    def _prepared(
        self, layouts: Sequence[FieldLayout], enqueued: Enqueued, pointers: Pointers, nbytes: int
    ) -> PreparedCall:
        """Return the work of a call with so many bytes to combine."""
        capturing, where = self._capturing, self._group.where
        if self._nodes is None:
            return PreparedCall(layouts, enqueued, pointers, capturing, where)
        capturing = capturing if nbytes <= most_captured_alone() else 0
        made = PreparedCall(layouts, enqueued, pointers, capturing, where)
        self._nodes.peers.ranks.graphs.add(made)
        return made

    def _require_aligned(self, addresses: Sequence[int]) -> None:
        itemsize = self._dtype.itemsize
        for address in addresses:
            if address % itemsize:
                raise ValueError(
                    f"an array begins at {address:#x}, which is not a multiple of its element's "
                    f"{itemsize} bytes"
                )

    def _enqueue(
        self, prepared: PreparedCall, addresses: tuple[int, ...], entered: StreamInfo
    ) -> None:
        self._follow(entered)
        self._launch_in_order(prepared, entered, addresses)
        self._flags.calls[0] += 1
        self._leave(entered)

    def _close_launches(self) -> None:
        for prepared in (*self._made, *self._dots.values()):
            prepared.close()
        self._made, self._dots, self._last_dot = [], {}, None
        if self._capturing:
            self._backend.close_stream(self._capturing)
            self._capturing = 0
        if self._nodes is not None:
            self._nodes.close()
        self._group.close()

    def _progress(self) -> tuple[int, bool]:
        return (0, False) if self._nodes is None else self._nodes.progress()


def _route_to_peers(setup: PlanSetup) -> Route:
    """Return the slowest route from this rank to the others of its node; COPY stands for turns."""
    comm = setup.comm
    forced = setup.same["MPISHARE_ROUTE"]
    others = [rank for rank in comm.ranks_here if rank != comm.rank]
    found = routes.choose(comm, setup.context.report.pairs, others, forced, on_gpu=True)
    # Within a node a reduction has no messages: host memory is the nearest.
    route = slowest(PINNED if route.is_of_mpi else route for route in found.values())
    return COPY if route is not FUSED and setup.context.report.time_sliced_gpus else route

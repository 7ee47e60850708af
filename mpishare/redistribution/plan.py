"""`Redistribute`: a global array, spread over the ranks one way, wanted another."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, SupportsIndex, overload

import numpy as np

from mpishare.coordination import recording
from mpishare.errors import MpiShareError
from mpishare.memory.arguments import axes_of, require_bool, shape_of
from mpishare.memory.memory import compact_strides
from mpishare.plans.base_plan import RoutedPlan
from mpishare.plans.cells import Box
from mpishare.plans.exchange.pair import EnginePair, engine_class
from mpishare.plans.fields import GivenFields, require_backend
from mpishare.plans.layout import FieldLayout, check_layout, is_tensor
from mpishare.plans.message import Message, Part
from mpishare.plans.setup import Description, agree_on_found, agree_on_routes, plan_setup
from mpishare.redistribution.arrays import Arrays, Side
from mpishare.redistribution.distribution import require_covered, require_disjoint, spread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

    from mpishare.memory.types import (
        AnyArray,
        Array,
        BackendName,
        DTypeLike,
        GivenArray,
        RouteName,
        Shape,
        Stream,
    )
    from mpishare.node import Node
    from mpishare.plans.exchange.pair import Engine
    from mpishare.redistribution.distribution import Distribution
    from mpishare.windows.window import Window

_CALL = "Redistribute"
_SOURCE, _TARGET = 0, 1
"""Both parts are the fields of every call, in this order: cells go from the one to the other."""


class Redistribute(RoutedPlan):
    """A global array that goes from one distribution over the ranks to another, many times.

    Transposes of distributed FFTs, changes of decomposition, all-gathers, scatters and gathers: one
    plan, made once, for any arrays. Collective over `comm`, host-blocking: some milliseconds on the
    host, more on CUDA.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks, on any number of nodes.
    shape : int or tuple of int
        Of the global array. Axes that no rank cuts, of components or batches, are among them.
    source, target : int, tuple of int, Box, OnRank or None
        Which part each rank has, and which it wants. An int is the axis that is cut: rank r has
        part r of `numpy.array_split`, which may be empty; -1 is the last axis. A tuple has the
        number of ranks along each axis, and rank r is at ``numpy.unravel_index(r, parts)``. A `Box`
        is this rank's own cells, given by each rank. None is the whole on every rank, ``OnRank(r)``
        the whole on one and nothing elsewhere. Sources are disjoint. Targets may overlap, and need
        not cover all.
    dtype : dtype
        Of the elements, as NumPy takes it; on GPUs of 1 to 16 bytes.
    permute : tuple of int, optional
        The order of the axes in the target's part, as in
        ``numpy.transpose(whole, permute)``: the last one named is contiguous there.
    in_place : bool
        Whether `out` may share memory with the array that is passed: be the same one, where both
        parts have one shape, or a view of it. It then goes through a copy.
    node, backend, require
        As for `HaloExchange`. By default the memory is that of the node.

    Attributes
    ----------
    source_shape, target_shape : tuple of int
        Of this rank's parts; that of the target after the permutation.
    source_box, target_box : Box
        This rank's parts in the global array, in the order of its axes.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if a distribution does not fit the array, if two sources share a cell, or if a
        wanted cell is in no source; the message names box and rank.
    PeerError
        If another rank's arguments are wrong; `MismatchError` if they differ where they must not.
    UnsupportedError
        If `require` refuses a route.

    Examples
    --------
    A matrix in blocks of rows becomes one in blocks of columns:

    >>> from mpi4py import MPI
    >>> comm = MPI.COMM_WORLD
    >>> n = 2 * comm.size
    >>> whole = numpy.arange(n * n).reshape(n, n)
    >>> with Redistribute(comm, (n, n), 0, 1, dtype=whole.dtype) as plan:
    ...     columns = plan.forward(whole[plan.source_box.slices])
    ...     rows = plan.backward(columns)
    >>> bool((columns == whole[:, 2 * comm.rank : 2 * comm.rank + 2]).all())
    True
    """

    _log = logging.getLogger("mpishare.redistribute")
    _noun = "a redistribution"
    _ranges = "forward", "backward", "start", "wait"

    def __init__(
        self,
        comm: MPI.Intracomm,
        shape: Shape,
        source: Distribution,
        target: Distribution,
        dtype: DTypeLike = float,
        *,
        permute: Sequence[SupportsIndex] | None = None,
        in_place: bool = False,
        node: Node | None = None,
        backend: Literal["auto"] | BackendName = "auto",
        require: RouteName | Sequence[RouteName] | None = None,
    ) -> None:
        def find() -> tuple[GivenFields, Description]:
            given = {"source": source, "target": target}
            return _described(comm, shape, given, dtype, permute, in_place, backend)

        with plan_setup(_CALL, comm, node, backend=backend) as start:
            agreed = agree_on_found(start, require, find)
            boxes = [
                [Box.unpack(packed[side]) for packed in agreed.geometry]
                for side in (_SOURCE, _TARGET)
            ]
            self._why_no_way_back = _require_cells(*boxes)
            self.source_box: Box = boxes[_SOURCE][comm.rank]
            self.target_box: Box = boxes[_TARGET][comm.rank]
            sends, recvs = _messages(boxes, comm.rank, agreed.setup.mine)
            routed = agree_on_routes(agreed.setup, [], sends, recvs, engine_class)
            source_side, target_side = sides = _sides(agreed.kept, routed.mine)
            setup = replace(routed, calls=("forward", "backward"))
            if setup.on_gpu:  # replays know the arrays of users, not the views of each call
                given = [each.given for each in sides]
                setup = replace(setup, given=given, as_fields=partial(_as_fields, sides))
            self._pair = EnginePair(setup, adds=False)
            self._forward = _Way(self._pair.forward, source_side, target_side, 1, setup.on_gpu)
            self._backward: _Way | None = None
            self._arrays = Arrays(on_gpu=setup.on_gpu)
            self._own = self._arrays.own if setup.on_gpu else None
            self._in_place = agreed.setup.same["in_place"]
            self._open_on_routes(setup)
        self.source_shape: tuple[int, ...] = source_side.shape
        self.target_shape: tuple[int, ...] = target_side.shape

    @overload
    def forward(self, a: Window, out: None = None, stream: Stream | None = None) -> AnyArray: ...
    @overload
    def forward(
        self, a: GivenArray, out: None = None, stream: Stream | None = None
    ) -> GivenArray: ...
    @overload
    def forward(self, a: Array, out: GivenArray, stream: Stream | None = None) -> GivenArray: ...
    def forward(self, a: Array, out: Array | None = None, stream: Stream | None = None) -> Any:
        """Return this rank's part of the target, given its part of the source.

        Collective over the plan's ranks. Stream-ordered on CUDA (a `mpi` route waits on the host);
        on the host backend it blocks until the part is there.

        Parameters
        ----------
        a : array
            This rank's part of the source: of `source_shape` and the plan's dtype, with any
            strides, from any allocator. One with gaps, or reversed, is copied first. A rank without
            cells gives an empty array of that shape.
        out : array, optional
            Where the part of the target is stored: of `target_shape` and the plan's dtype. Default:
            a new array, of the library of `a`. It may not overlap `a`, unless the plan was made
            with ``in_place=True``; nor what another rank passes, as views of one window may.
        stream : stream, optional
            The stream that writes `a` and reads the result. Default: the current one of the library
            that `a` comes from.

        Returns
        -------
        array
            `out`, or the new one.

        Raises
        ------
        TypeError, ValueError
            If an array is not what the plan was made for; the message says what differs. Nothing
            was done then.
        EpochError
            If a redistribution is open.
        PeerError, PeerTimeout
            If a rank is gone or does not come.
        ClosedError
            If the plan is closed.
        """
        return self._redistribute(self._forward, "forward", a, out, stream)

    @overload
    def backward(self, b: Window, out: None = None, stream: Stream | None = None) -> AnyArray: ...
    @overload
    def backward(
        self, b: GivenArray, out: None = None, stream: Stream | None = None
    ) -> GivenArray: ...
    @overload
    def backward(self, b: Array, out: GivenArray, stream: Stream | None = None) -> GivenArray: ...
    def backward(self, b: Array, out: Array | None = None, stream: Stream | None = None) -> Any:
        """Return this rank's part of the source, given its part of the target: the way back.

        Collective, as `forward`; the first call allocates, host-blocking, and cannot be captured
        into a graph. Parameters and errors as `forward`.

        Raises
        ------
        UnsupportedError
            If targets overlap, or lack a cell of the source.
        """
        way = self._backward or self._make_backward("backward", stream, b)
        return self._redistribute(way, "backward", b, out, stream)

    def start(
        self,
        a: Array,
        out: Array | None = None,
        stream: Stream | None = None,
        *,
        backward: bool = False,
    ) -> None:
        """Begin `forward`, or `backward`, beside other work, which leaves both arrays alone.

        Collective over the plan's ranks. Parameters and errors as those of these calls.
        """
        way = self._forward
        if backward:
            way = self._backward or self._make_backward("start", stream, a)
        # As in `halo.plan.Plan.start`, no function is entered between the call and its note.
        self._open = way, *self._make(way.engine.start, way, "start", a, out, stream)
        if recording.UNDER_WAY:
            self._end_with_capture()

    def wait(self, stream: Stream | None = None) -> AnyArray:
        """End what `start` began, and return the part that it brings.

        Collective over the plan's ranks. Stream-ordered on CUDA, as `forward`.

        Raises
        ------
        EpochError
            Without a `start`.
        """
        opened = self._open
        self._check_started(opened)
        way, fields, result, copied = opened
        try:
            way.engine.wait(fields, stream)
        except BaseException as error:
            self._fail("wait", error)
        self._open = None
        if copied is not None:
            found, target = copied
            self._arrays.copy_into(found, target, stream)
        return result

    # --- a call

    def _redistribute(self, way: _Way, name: str, given: Any, out: Any, stream: Any) -> Any:
        _, result, copied = self._make(way.engine.exchange, way, name, given, out, stream)
        if copied is not None:
            found, target = copied
            try:
                self._arrays.copy_into(found, target, stream)
            except BaseException as error:
                # For the others the call is over: made again, it would be taken for the next one.
                self._context.life.leave(f"{self.name}: {name}", error)
                raise
        return result

    def _make(
        self,
        call: Callable[[Any, Any], None],
        way: _Way,
        name: str,
        given: Any,
        out: Any,
        stream: Any,
    ) -> _Call:
        """Make a call of the engine: with the arrays as they are if they fit, else with copies."""
        if self._open is not None or self._is_closed:
            self._check_free(name)
        own = self._own
        if type(given) is own and type(out) is own:  # most calls on GPUs: no function is entered
            fields, result = ((given, out) if way.order > 0 else (out, given)), out
        else:
            fields, result = self._known(way, name, given, out, stream)
        if fields is not None:
            try:
                call(fields, stream)
            except MpiShareError:
                raise
            except (TypeError, ValueError):  # nothing is done: they were not right
                if self._context.agreement.life.failure is not None:
                    raise  # of a handler of a signal, amid the call
            else:
                return fields, result, None
        try:
            made = self._prepared(way, given, out, stream)
            call(made[0], stream)
        except BaseException as error:
            self._fail(name, error)
        return made

    def _known(self, way: _Way, name: str, given: Any, out: Any, stream: Any) -> tuple[Any, Any]:
        """Return the fields of a call of which the engine can check the rest, and its result.

        None and None for arrays that need a closer look first.
        """
        source = self._known_array(way, way.read, name, given, "the array")
        if source is None:
            return None, None
        result = self._arrays.new(given, way.written, stream) if out is None else out
        target = self._known_array(way, way.written, name, result, "out")
        return (None, None) if target is None else (way.fields(source, target), result)

    def _known_array(self, way: _Way, side: Side, call: str, array: Any, name: str) -> Any:
        """Return an array that the engine knows, in host memory as NumPy's; None for others."""
        own = self._arrays.own
        if type(array) is not own and is_tensor(array):
            if way.on_gpu:
                return array
            try:
                array = self._arrays.seen(array, name)
            except (TypeError, ValueError) as error:
                raise self._named(call, error) from None
        is_known = type(array) is own and (way.on_gpu or array.shape == side.shape)
        return array if is_known else None

    def _prepared(self, way: _Way, given: Any, out: Any, stream: Any) -> _Call:
        """Return a call with arrays that the engine can use, made where they were not given."""
        arrays, read, written = self._arrays, way.read, way.written
        source = arrays.checked(given, "the array", read)
        if out is None:
            result = arrays.new(given, written, stream)
            found = target = arrays.seen(result, "out")
        else:
            result = out
            found = target = arrays.checked(out, "out", written, is_written=True)
            is_shared = arrays.share_memory(source, target)
            if is_shared and not self._in_place:
                raise ValueError(
                    "out shares memory with the array: make the plan with in_place=True, or give "
                    "an out in other memory, or none"
                )
            if is_shared or not arrays.fits(target, written):
                target = arrays.new(found, written, stream)
        if not arrays.fits(source, read):
            source = arrays.compact(source, stream)
        copied = None if found is target else (found, target)
        return way.fields(source, target), result, copied

    def _make_backward(self, name: str, stream: Any, given: Any) -> _Way:
        """Make the engine of the way back. Collective, host-blocking."""
        self._check_free(name)
        if self._why_no_way_back:
            raise self._refused(
                name,
                f"{self._why_no_way_back}. Make another plan for the way back, whose sources are "
                "disjoint.",
            )
        there = self._forward

        def check() -> list[Any]:
            try:
                return [self._arrays.checked(given, "the array", there.written)]
            except (TypeError, ValueError) as error:
                raise self._named("backward", error) from None

        engine = self._make_reverse("backward", self._pair, check, stream, self._pair.make_reverse)
        self._backward = _Way(engine, there.written, there.read, -1, there.on_gpu)
        return self._backward

    @property
    def _engines(self) -> list[Engine]:
        return self._pair.engines

    def __repr__(self) -> str:
        return (
            f"<mpishare.{self.name}: source={_span(self.source_box)}, "
            f"target={_span(self.target_box)}, dtype={self._setup.mine[0].dtype}, "
            f"routes={self._named_routes()}{self._state()}>"
        )


def _span(box: Box) -> str:
    return f"{box.lower} to {box.upper}"


class _Way(NamedTuple):
    """One direction: its engine, and this rank's parts."""

    engine: Engine
    read: Side
    written: Side
    order: int  # of these two among the fields of the engine: 1, or -1 for the way back
    on_gpu: bool

    def fields(self, given: Any, out: Any) -> Any:
        """Return the fields of the engine: the source, then the target.

        On GPUs those are the arrays of users, on the host views with the axes of the whole.
        """
        if not self.on_gpu:
            given, out = self.read.as_cells(given), self.written.as_cells(out)
        return (given, out)[:: self.order]


def _as_fields(sides: Sequence[Side], arrays: Sequence[Any]) -> list[Any]:
    return [side.as_cells(array) for side, array in zip(sides, arrays, strict=True)]


_Call = tuple[Any, Any, Any]
"""What the engine moves, what the call returns, and if that is received elsewhere, to and from."""


def _described(
    comm: MPI.Intracomm,
    shape: Any,
    given: dict[str, Any],
    dtype: Any,
    permute: Any,
    in_place: Any,
    backend: Any,
) -> tuple[GivenFields, Description]:
    """Return this rank's parts of the `given` source and target, and what is agreed of them."""
    require_backend(backend)
    shape = shape_of(shape)
    if not shape:
        raise ValueError("shape has no axes")
    order, dtype = _order_of(permute, len(shape)), _dtype_of(dtype)
    names, boxes, layouts = {}, [], []
    for (side, each), axes in zip(given.items(), (range(len(shape)), order), strict=True):
        names[side], box = spread(side, each, shape, comm.rank, comm.size)
        if prod(box.shape) * dtype.itemsize > sys.maxsize or max(shape) > sys.maxsize:
            raise ValueError(f"this rank's part of the {side}, {box.shape}, is too large")
        strides = compact_strides(box.shape, dtype.itemsize, axes)
        layouts.append(check_layout(FieldLayout(box.shape, strides, dtype, None), "dtype"))
        boxes.append(box.pack())
    same = {
        "shape": shape,
        "permute": order,
        "in_place": require_bool("", "in_place", in_place),
        **names,
    }
    return GivenFields([], layouts, backend, takes_any=False), Description(same, boxes, order)


def _dtype_of(given: Any) -> np.dtype[Any]:
    if given is None:  # any dtype, as in a `Layout`, and not NumPy's float64
        raise TypeError(
            "dtype is None, and a Redistribute is for one dtype: name it, dtype=a.dtype, or leave "
            "it out for float64"
        )
    try:
        found: np.dtype[Any] = np.dtype(given)
    except TypeError:
        raise TypeError(
            f"dtype must be one of NumPy, such as 'f4' or numpy.float32, not {given!r}"
        ) from None
    return found


def _order_of(permute: Any, ndim: int) -> tuple[int, ...]:
    order = range(ndim) if permute is None else axes_of("permute", permute, ndim)
    if len(order) != ndim:
        raise ValueError(f"permute must name each of {ndim} axes once, not {permute!r}")
    return tuple(order)


def _require_cells(sources: Sequence[Box], targets: Sequence[Box]) -> str:
    """Raise `ValueError` if a wanted cell has not one source; return why there is no way back."""
    require_disjoint("source", sources, "a cell has one source")
    require_covered(targets, sources, "rank {rank} wants {box}, which no rank has")
    try:
        require_disjoint("target", targets, "on the way back a cell would have two sources")
        require_covered(
            sources, targets, "rank {rank} has {box} of the source, which is in no target"
        )
    except ValueError as error:
        return str(error)
    return ""


def _messages(
    boxes: Sequence[Sequence[Box]], rank: int, layouts: Sequence[FieldLayout]
) -> tuple[list[Message], list[Message]]:
    """Return this rank's messages, one for each rank with which it has cells in common."""
    found: tuple[list[Message], list[Message]] = [], []
    for field, far in ((_SOURCE, _TARGET), (_TARGET, _SOURCE)):
        mine = boxes[field][rank]
        for peer, theirs in enumerate(boxes[far]):
            if (both := mine & theirs).size:
                box = both.seen_from(mine.lower)
                part = Part.of_box(field, layouts[field], box, far)
                found[field].append(Message(peer, 0, (part,)))
    return found


def _sides(order: tuple[int, ...], layouts: Sequence[FieldLayout]) -> tuple[Side, Side]:
    source, target = layouts
    is_permuted = order != tuple(range(len(order)))
    cells = tuple(int(at) for at in np.argsort(order)) if is_permuted else None
    ends = target.shape, target.strides
    shape, strides = (tuple(each[axis] for axis in order) for each in ends)
    given = replace(target, shape=shape, strides=strides)
    return (
        Side("source", source.shape, source, source, None),
        Side("target", shape, given, target, cells),
    )

"""How a window comes to be: one rank allocates, hands its handle round, and every rank maps it."""

from __future__ import annotations

import operator
import pickle
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare import ranges
from mpishare.coordination.agreement import require_same
from mpishare.errors import MpiShareError, UnsupportedError
from mpishare.memory.handle import Handle
from mpishare.ordering.epochs import Epochs
from mpishare.window import Window

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.backends import Memory
    from mpishare.context import NodeContext

_CUDA_DTYPES = "?bhilqBHILQefdFD"
"""Type characters of the dtypes that CuPy has."""


def allocate(context: NodeContext, shape: Any, dtype: Any, fill: Any, owner: Any) -> Window:
    """Make a window that one rank allocates. Collective; see `Node.allocate`."""
    call = "Node.allocate"

    def check() -> dict[str, Any]:
        layout = _layout(context, call, shape, dtype)
        return {
            "shape": list(layout[0]),
            "dtype": str(layout[1]),
            "fill": _fill_told(call, fill, layout[1]),
            "owner": _owner(context, call, owner),
        }

    arguments = context.agreement.step(call, check)
    require_same(call, arguments, context.rank)
    owner = arguments[0]["owner"]
    kind = np.dtype(dtype)
    return _one(context, call, tuple(arguments[0]["shape"]), kind, owner, _filler(fill))


def allocate_each(context: NodeContext, shape: Any, dtype: Any, fill: Any) -> Window:
    """Make a window of which every rank allocates its segment. Collective."""
    call = "Node.allocate_each"

    def check() -> tuple[list[int], str]:
        layout = _layout(context, call, shape, dtype)
        _fill_told(call, fill, layout[1])
        return list(layout[0]), str(layout[1])

    arguments = context.agreement.step(call, check)
    require_same(call, [{"dtype": kind} for _, kind in arguments], context.rank)
    shapes: list[tuple[int, ...] | None] = [tuple(extent) for extent, _ in arguments]
    return _make(context, call, shapes, np.dtype(dtype), None, _filler(fill))


def share(context: NodeContext, source: Any, owner: Any) -> Window:
    """Make a window of what one rank has or computes. Collective; see `Node.share`."""
    call = "Node.share"
    made: list[Any] = []

    def evaluate() -> dict[str, Any]:
        rank = _owner(context, call, owner)
        if context.rank != rank:
            return {"owner": rank}
        array = source() if callable(source) else source
        if not isinstance(getattr(array, "dtype", None), np.dtype):
            is_on_gpu = hasattr(array, "__cuda_array_interface__")
            array = (context.backend.xp if is_on_gpu else np).asarray(array)  # a tensor, a list
        shape, dtype = _layout(context, call, tuple(array.shape), np.dtype(array.dtype))
        made.append(array)
        return {"owner": rank, "shape": list(shape), "dtype": pickle.dumps(dtype).hex()}

    replies = context.agreement.step(call, evaluate)
    require_same(call, [{"owner": reply["owner"]} for reply in replies], context.rank)
    told = replies[replies[0]["owner"]]
    # From a rank of the same job: nothing that could be forged further than the job itself.
    dtype = pickle.loads(bytes.fromhex(told["dtype"]))  # noqa: S301

    def copy(array: Any) -> None:
        array[...] = context.backend.xp.asarray(made[0])

    return _one(context, call, tuple(told["shape"]), dtype, replies[0]["owner"], copy)


def _one(
    context: NodeContext,
    call: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    owner: int,
    write: Callable[[Any], None] | None,
) -> Window:
    shapes: list[tuple[int, ...] | None] = [None] * context.size
    shapes[owner] = shape
    return _make(context, call, shapes, dtype, owner, write)


def _make(
    context: NodeContext,
    call: str,
    shapes: list[tuple[int, ...] | None],
    dtype: np.dtype[Any],
    owner: int | None,
    write: Callable[[Any], None] | None,
) -> Window:
    with ranges.span(call):
        return _build(context, call, shapes, dtype, owner, write)


def _build(
    context: NodeContext,
    call: str,
    shapes: list[tuple[int, ...] | None],
    dtype: np.dtype[Any],
    owner: int | None,
    write: Callable[[Any], None] | None,
) -> Window:
    memories: list[Memory | None] = [None] * context.size
    token: list[str] = []
    agreement, backend, rank = context.agreement, context.backend, context.rank

    def create() -> None:
        shape = shapes[rank]
        if shape is not None:
            nbytes = _nbytes(shape, dtype)
            memories[rank] = memory = backend.allocate(nbytes)
            if write is not None and nbytes:
                write(memory.array(shape, dtype))
                context.synchronize(None, call)

    def publish() -> str:
        shape, memory = shapes[rank], memories[rank]
        if shape is None or memory is None:
            return ""
        token.append(backend.publish(memory))
        return context.handle(token[0], 0, _nbytes(shape, dtype), memory.nbytes)

    def open_others() -> None:
        for other, shape in enumerate(shapes):
            if other != rank and shape is not None:
                handle = Handle.unpack(
                    handles[other],
                    backend=backend.name,
                    nonce=context.nonces[other],
                    nbytes=_nbytes(shape, dtype),
                )
                memories[other] = backend.open(handle.token, handle.capacity, handle.uuid)

    try:
        agreement.step(call, create)
        handles = agreement.step(call, publish)
        agreement.step(call, open_others)
        counters = context.take_counters(call, Epochs.words(context.size))
    except BaseException as error:
        _clear_frames(error)
        _undo(context, call, memories)
        raise
    finally:
        for own in token:
            backend.retract(own)
    return Window(context, context.number("window"), counters, memories, shapes, dtype, owner)


def _clear_frames(error: BaseException | None) -> None:
    """Let go of what the frames of an error hold: arrays of the memory that is about to go."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _undo(context: NodeContext, call: str, memories: list[Memory | None]) -> None:
    """Free what a failed call has made: importers first, as in `close`."""

    def release() -> None:
        for rank, memory in enumerate(memories):
            if rank != context.rank and memory is not None:
                memory.close()

    try:
        context.agreement.step(call, release)
    except MpiShareError:
        # The node itself is broken: others may still map this memory, so it is left to the end of
        # the process. The error that brought us here says more than this one.
        return
    mine = memories[context.rank]
    if mine is not None:
        mine.close()


def _layout(
    context: NodeContext, call: str, shape: Any, dtype: Any
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    extents = shape if isinstance(shape, tuple | list) else (shape,)
    try:
        sizes = tuple(operator.index(extent) for extent in extents)
    except TypeError:
        raise TypeError(f"{call} failed: shape must be ints, not {shape!r}") from None
    if any(size < 0 for size in sizes):
        raise ValueError(f"{call} failed: negative extents in shape {sizes}")
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"{call} failed: {error}") from None
    if kind.hasobject:
        raise TypeError(f"{call} failed: dtype {kind} holds Python objects, which cannot be shared")
    is_native = kind.char in _CUDA_DTYPES and kind.isnative
    if context.backend.name == "cuda" and not is_native:
        raise UnsupportedError(
            f"{call} failed: CuPy has no dtype {kind}. Share its bytes: dtype='u1'."
        )
    if _nbytes(sizes, kind) >= 1 << 62:
        raise ValueError(f"{call} failed: shape {sizes} of {kind} is {_nbytes(sizes, kind)} bytes")
    return sizes, kind


def _nbytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return int(np.prod(shape, dtype=object)) * dtype.itemsize


def _owner(context: NodeContext, call: str, owner: Any) -> int:
    return 0 if owner is None else context.rank_of(call, owner)


def _fill_told(call: str, fill: Any, dtype: np.dtype[Any]) -> str | None:
    """Return the value in words that tell it from any other; raises where it does not fit."""
    if fill is None:
        return None
    if np.ndim(fill):
        raise ValueError(f"{call} failed: fill must be a scalar, not of shape {np.shape(fill)}")
    try:
        value = np.full((), fill, dtype=dtype)
    except (OverflowError, ValueError) as error:
        raise ValueError(f"{call} failed: fill={fill!r} does not fit {dtype}") from error
    # All that is no number has the same word, and only that differs from itself.
    return str(value) if value == value else f"{value}, {value.tobytes().hex()}"


def _filler(fill: Any) -> Callable[[Any], None] | None:
    if fill is None:
        return None

    def write(array: Any) -> None:
        array[...] = fill

    return write

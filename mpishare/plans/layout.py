"""The layout of a field: agreed on by a plan, required of each call's arrays.

`Layout` is the public stand-in for an array that is not there yet, `FieldLayout` the form in plans.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.memory.arguments import shape_of
from mpishare.memory.memory import compact_strides, span_nbytes
from mpishare.memory.numbers import number_of, on_memory_of
from mpishare.windows.window import Window

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.memory.types import DTypeLike, Order, Shape

MAX_WORD_NBYTES = 16  # of an element in GPU memory; on the host, records have any size


@dataclass(frozen=True)
class FieldLayout:
    """The memory layout of an array; `device` is None in host memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes; none negative
    dtype: np.dtype[Any]
    device: int | None

    @classmethod
    def of_host(cls, array: np.ndarray[Any, Any]) -> FieldLayout:
        """Return the layout of an array in host memory."""
        return cls(array.shape, array.strides, array.dtype, None)

    @cached_property
    def span_nbytes(self) -> int:
        """Bytes from the first byte of the first element to the last byte of the last."""
        return span_nbytes(self.shape, self.strides, self.dtype.itemsize)

    @cached_property
    def is_plain(self) -> bool:
        """Whether its elements are numbers, which NumPy copies fastest as they are."""
        return self.dtype.kind in "biufc" or number_of(self.dtype) is not None

    @cached_property
    def carrier(self) -> np.dtype[Any]:
        """The dtype in which elements travel: their own, or bytes for a compound dtype."""
        return self.dtype if self.is_plain else np.dtype(f"V{self.dtype.itemsize}")

    def is_packed(self, order: Order) -> bool:
        """Whether the elements are contiguous in this order, ``"C"`` or ``"F"``."""
        packed = Layout(self.shape, self.dtype, order).of_field()
        return replace(packed, device=self.device).is_like(self)

    @property
    def kind(self) -> tuple[Any, ...]:
        """All but the strides."""
        return self.shape, self.dtype, self.device

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """What tells arrays apart: a stride counts where it leads from one element to another."""
        axes = () if 0 in self.shape else zip(self.shape, self.strides, strict=True)
        return *self.kind, *(step for extent, step in axes if extent > 1)

    def is_like(self, other: FieldLayout) -> bool:
        """Whether an array of the other layout can take this one's place."""
        return self.key == other.key

    def difference(self, other: FieldLayout) -> str:
        """Return the differences of `other` from this layout, for an error."""
        names = ["shape", "dtype", "device"]
        if (self.shape, self.dtype) == (other.shape, other.dtype):
            names.append("strides")  # those of another shape or dtype differ anyhow
        return ", ".join(
            f"{name} {getattr(other, name)} instead of {getattr(self, name)}"
            for name in names
            if getattr(other, name) != getattr(self, name)
        )

    def require(self, other: FieldLayout, name: str = "a field") -> None:
        """Raise `ValueError` unless the other layout `is_like` this one."""
        if not self.is_like(other):
            raise ValueError(
                f"{name} has another layout than the plan was made for: {self.difference(other)}. "
                + self._remedy(other, name)
            )

    def _remedy(self, other: FieldLayout, name: str) -> str:
        plan = "make another plan for it"
        if "field" in name:  # not the array of an `Allreduce`
            plan += " (halo exchanges of Layout.any take all fields of a block)"
        if self.kind == other.kind:
            xp, axes = "numpy" if self.device is None else "cupy", range(len(self.shape))
            for order, make in ((axes, "ascontiguousarray"), (axes[::-1], "asfortranarray")):
                if self.strides == compact_strides(self.shape, self.dtype.itemsize, order):
                    return f"Store it in the plan's order, u = {xp}.{make}(u), or {plan}."
        return f"{plan[0].upper()}{plan[1:]}."


@dataclass(frozen=True)
class Layout:
    """Stands for a field where a plan is made before there are arrays.

    Local. Such a plan is made for the backend of its node, the GPU where there is one: for NumPy
    arrays on a machine with GPUs give it ``backend="host"``. Each call is given its arrays.

    Parameters
    ----------
    shape : int or tuple of int
        Of the field, ghosts counted.
    dtype : dtype or None
        As NumPy takes it. None is for any fields: see the notes.
    order : str
        ``"C"`` or ``"F"``: the last or the first axis is the fastest in memory.

    Notes
    -----
    ``Layout(shape, None)``, or `Layout.any`, makes one plan for all fields of a block: `shape` is
    that of a field with only the axes that the plan cuts, and each call may give any number of
    fields, of any dtypes, with any other axes (the last ones, unless ``axes=`` or ``axis=`` names
    those that are cut), in any order in memory. The first call with a new
    combination is an agreement of the ranks: it is host-blocking, allocates, and cannot be captured
    into a graph. The combination is kept until the plan is closed, and later calls cost as much as
    those of a plan for these fields alone. If one rank gives a known combination while others give
    a new one, all of them get an error.

    Raises
    ------
    TypeError, ValueError
        If there can be no such array.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> node = Node(MPI.COMM_SELF, backend="host")
    >>> halo = HaloExchange(node.comm, Layout(4), 1, dims=(1,), periods=True, node=node)
    >>> u = numpy.array([0.0, 1.0, 2.0, 0.0])
    >>> halo.exchange(u)
    >>> u
    array([2., 1., 2., 1.])
    >>> halo.close()

    One plan for any fields of a block of four cells:

    >>> halo = HaloExchange(node.comm, Layout.any(4), 1, dims=(1,), periods=True, node=node)
    >>> pairs = numpy.array([[0, 0], [1, 2], [3, 4], [0, 0]])
    >>> halo.exchange(u, pairs)
    >>> pairs.tolist()
    [[3, 4], [1, 2], [3, 4], [1, 2]]
    >>> node.close()
    """

    shape: tuple[int, ...]
    dtype: Any = float
    order: str = "C"

    @classmethod
    def any(cls, shape: Shape) -> Layout:
        """Return the layout of any fields of a block: ``Layout(shape, None)``. Local.

        Parameters
        ----------
        shape : int or tuple of int
            Of the axes that the plan cuts, ghosts counted.
        """
        return cls(shape, None)

    if TYPE_CHECKING:  # what may be given, where the fields have what it becomes

        def __init__(
            self,
            shape: Shape,
            dtype: DTypeLike | None = float,
            order: Order = "C",
        ) -> None: ...

    def __post_init__(self) -> None:
        """Normalize the shape to a tuple and the dtype to a `numpy.dtype`."""
        shape = shape_of(self.shape)
        if self.order not in ("C", "F"):
            raise ValueError(f"order must be 'C' or 'F', not {self.order!r}")
        object.__setattr__(self, "shape", shape)
        if self.dtype is not None:
            object.__setattr__(self, "dtype", np.dtype(self.dtype))
        elif self.order != "C":
            raise ValueError("a Layout without dtype stands for fields of any order: give none")

    def of_field(self) -> FieldLayout:
        """Return the layout of such a field in host memory; of bytes, if any dtype will do."""
        dtype = np.dtype("u1") if self.dtype is None else self.dtype
        axes = range(len(self.shape))
        order = axes[::-1] if self.order == "F" else axes
        return FieldLayout(
            self.shape, compact_strides(self.shape, dtype.itemsize, order), dtype, None
        )


def name_fields(layouts: Sequence[FieldLayout]) -> str:
    """Return dtype and shape of fields, each once: ``2 x float64(6, 5) + int32(6,)``."""
    counts = Counter(f"{each.dtype}{each.shape}" for each in layouts)
    return " + ".join(f"{n} x {name}" if n > 1 else name for name, n in counts.items())


def takes_any(fields: Sequence[Any]) -> bool:
    """Whether a Layout without dtype stands for all fields of a plan: it must stand alone."""
    found = any(isinstance(field, Layout) and field.dtype is None for field in fields)
    if found and len(fields) > 1:
        raise ValueError(
            f"{len(fields)} fields, one of them a Layout without dtype, which stands for all "
            "fields of a call: give it alone"
        )
    return found


def is_tensor(field: Any) -> bool:
    """Whether a field is PyTorch's, which is not imported for that."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(field, torch.Tensor)


def is_on_gpu(field: Any) -> bool:
    """Whether an array of any library is in GPU memory."""
    # Tensors in host memory have the interface, too, and raise where it is read.
    is_cuda = getattr(field, "is_cuda", None)
    return hasattr(field, "__cuda_array_interface__") if is_cuda is None else bool(is_cuda)


def refuse_jax(field: Any, name: str) -> None:
    """Raise `TypeError` for an array of JAX, or for a tracer of one."""
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(field, jax.Array):
        raise TypeError(
            f"{name} is a JAX array, which cannot be written. Make the plan for a Layout, and call "
            "u = mpishare.jax.exchange(plan, u), or reduce and dot of mpishare.jax for an "
            "Allreduce; for a Redistribute copy it, node.xp.array(u)."
        )


def refuse_gradient(field: Any, name: str) -> None:
    """Raise `ValueError` for a tensor that autograd follows: it would not see the call."""
    if getattr(field, "requires_grad", False):
        raise ValueError(
            f"{name} requires a gradient, and PyTorch would not see that it changes: make the call "
            "in a torch.autograd.Function (docs/pytorch.md), or give its .detach()"
        )


# A union of types is made anew wherever it is written out: a third of the time of `as_numpy`.
_NO_ARRAYS = (list, tuple, int, float, str, bytes, type(None))


def as_numpy(field: Any, name: str) -> np.ndarray[Any, Any]:
    """Return a NumPy array on the same memory, or raise `TypeError`."""
    if type(field) is np.ndarray:
        return field
    masked = sys.modules.get("numpy.ma")  # NumPy imports it at first use, in 15 ms
    if masked is not None and isinstance(field, masked.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask cannot travel: give its .data")
    refuse_jax(field, name)
    if isinstance(field, np.ndarray):
        return np.asarray(field)  # a subclass may keep cells from being written
    refuse_gradient(field, name)
    if isinstance(field, _NO_ARRAYS):
        raise TypeError(
            f"{name} is not an array but of type {type(field).__name__}: a list or a tuple is one "
            "of arrays. Make an array of it first, u = numpy.array(u), and give that"
        )
    try:
        array = on_memory_of(field)
    except (AttributeError, TypeError, BufferError, RuntimeError) as error:
        raise TypeError(f"{name} is not an array that NumPy can read: {error}") from error
    if not array.flags.writeable and hasattr(field, "__array__"):
        # Before 2.2 NumPy calls all that it gets by DLPack read-only.
        found = np.asarray(field)
        if found.ctypes.data == array.ctypes.data:  # no copy
            return found
    return array


def host_layout(array: np.ndarray[Any, Any], name: str) -> FieldLayout:
    """Return the layout of an array in host memory; `ValueError` if it is read-only."""
    require_writeable(array, name)
    return check_layout(FieldLayout.of_host(array), name)


def require_writeable(array: np.ndarray[Any, Any], name: str) -> None:
    """Raise `ValueError` for a read-only array."""
    if not array.flags.writeable:
        raise ValueError(f"{name} is read-only, and the call writes into it: give a copy")


def require_ints(array: Any, name: str) -> None:
    """Raise `TypeError` unless an array, or its layout, has ints along one axis."""
    if len(array.shape) != 1 or array.dtype not in (np.int32, np.int64):
        raise TypeError(
            f"{name} are an array of int32 or int64 along one axis, not "
            f"{array.dtype}{list(array.shape)}"
        )


def check_layout(layout: FieldLayout, name: str) -> FieldLayout:
    """Return the layout if its cells can be written one by one, else raise."""
    if layout.dtype.subdtype is not None:
        raise TypeError(f"{name} has elements of dtype {layout.dtype}, which are arrays themselves")
    if layout.dtype.hasobject:
        raise TypeError(
            f"{name} holds Python objects, which cannot travel: give numbers, u.astype(float)"
        )
    if not layout.dtype.itemsize:
        raise TypeError(f"{name} has elements of dtype {layout.dtype}, which have no bytes")
    if layout.device is not None:
        require_word(layout)
    pairs = zip(layout.shape, layout.strides, strict=True)
    # Of an array without elements NumPy may make all strides zero.
    if 0 not in layout.shape and any(extent > 1 and step <= 0 for extent, step in pairs):
        raise ValueError(
            f"{name} has strides {layout.strides}: they must be positive. Give a copy, or the "
            "array that it is a view of"
        )
    return layout


def require_word(layout: FieldLayout) -> None:
    """Raise `TypeError` for elements that kernels, which move one by a word, cannot move."""
    size = layout.dtype.itemsize
    if size > MAX_WORD_NBYTES:
        raise TypeError(
            f"elements of {layout.dtype} have {size} bytes, and in GPU memory they have 1 to "
            f"{MAX_WORD_NBYTES}: give their bytes, u.view('u1'), as fields of shape "
            f"{(*layout.shape, size)}"
        )


def require_number(fields: Sequence[Any], wanted: int) -> None:
    """Raise `ValueError` unless a call has as many fields as the plan."""
    if len(fields) != wanted:
        hint = ". Make another plan for other fields"
        if len(fields) == 1 and isinstance(fields[0], list | tuple):
            hint = ": pass the arrays one by one, exchange(*fields)"
        raise ValueError(f"{len(fields)} fields given, the plan was made for {wanted}{hint}")


def as_list(fields: Any) -> list[Any]:
    """Return one array, or a list or tuple of them, as a list of arrays."""
    found: Sequence[Any] = fields if isinstance(fields, list | tuple) else [fields]
    if not found:
        raise ValueError("fields is empty: a plan is made for one array at least")
    return [*map(array_of, found)]


def array_of(field: Any) -> Any:
    """Return the array for which a window stands, and anything else as it is."""
    return field.array if isinstance(field, Window) else field


def array_at(address: int, layout: FieldLayout) -> np.ndarray[Any, Any]:
    """Return an array for memory at an address, which it does not hold, in the carriers' dtype."""
    cells = (ctypes.c_char * layout.span_nbytes).from_address(address)
    return np.ndarray(
        layout.shape, layout.carrier, buffer=memoryview(cells), strides=layout.strides
    )

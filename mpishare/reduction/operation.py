"""The reduction operations, and the elements that each of them takes."""

from __future__ import annotations

from contextvars import copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpishare.memory.numbers import NUMBERS, Number, as_numbers, number_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mpishare.memory.types import Order
    from mpishare.plans.engine import PlanSetup

    Combine = Callable[..., Any]

BLOCK = 8192
"""Elements of a row of a local dot product; OpenBLAS starts threads above 10 000."""


class _Row(NamedTuple):
    combine: Combine  # as a ufunc of two arrays: `out` may be the first
    kernel: str  # the same in kernels, of the numbers a and b
    kinds: str  # of the numbers that it takes
    heeds_signs: bool = False  # of integers; without, kernels take them as unsigned ones


def _multiply(first: Any, second: Any, out: Any) -> None:
    """Multiply complex numbers by their parts: NumPy fuses these in some layouts of an array."""
    if out.dtype.kind != "c":
        np.multiply(first, second, out=out)
        return
    real = first.real * second.real - first.imag * second.imag
    imag = first.real * second.imag + first.imag * second.real
    out.real, out.imag = real, imag


def _locate(is_beyond: np.ufunc) -> Combine:
    """Combine complex numbers ``value + 1j * index`` by their values.

    Of equal values the lowest index wins, and so it does of several NaNs.
    """

    def combine(first: Any, second: Any, out: Any) -> None:
        old, new = first.real, second.real
        was_nan, is_nan = np.isnan(old), np.isnan(new)
        is_tie = (old == new) | (was_nan & is_nan)
        wins = is_beyond(new, old) | (is_nan & ~was_nan) | (is_tie & (second.imag < first.imag))
        out[...] = np.where(wins, second, first)

    return combine


_LARGER, _SMALLER = "a >= b || a != a ? a : b", "a <= b || a != a ? a : b"
OPERATIONS = {
    "sum": _Row(np.add, "a + b", "iufc"),
    "max": _Row(np.maximum, _LARGER, "biuf", heeds_signs=True),
    "min": _Row(np.minimum, _SMALLER, "biuf", heeds_signs=True),
    "prod": _Row(_multiply, "a * b", "iufc"),
    "maxloc": _Row(_locate(np.greater), "locate(a, b, b.re > a.re)", "c"),
    "minloc": _Row(_locate(np.less), "locate(a, b, b.re < a.re)", "c"),
    "land": _Row(np.logical_and, "a && b", "biu"),
    "lor": _Row(np.logical_or, "a || b", "biu"),
    "lxor": _Row(np.logical_xor, "!a != !b", "biu"),
    "band": _Row(np.bitwise_and, "a & b", "biu"),
    "bor": _Row(np.bitwise_or, "a | b", "biu"),
    "bxor": _Row(np.bitwise_xor, "a ^ b", "biu"),
}
_TAKES = {
    "c": "{} takes complex numbers: the values, and 1j times their indices, x + 1j * comm.rank",
    "biu": "{} takes integers and bool: compare floats and complex numbers first, x != 0",
}
_REFUSED = {
    "c": "complex numbers have no {}: reduce their absolute values, or the real and the imaginary "
    "parts as floats, x.view(float)",
    "b": "bool elements have no {}: take 'lor' for whether any is true, 'land' for whether all "
    "are, or count them as integers, x.astype(int)",
}


def packing_order(setup: PlanSetup) -> Order:
    """Return the order in which all ranks pack their elements.

    Fields that are all packed in Fortran order need no copy in that order.
    """
    return "F" if all(each[0].is_packed("F") for each in setup.layouts) else "C"


def name_of(op: Any) -> Any:
    """Return the name of an operation of MPI, such as `MPI.SUM`; anything else as it is."""
    from mpi4py import MPI

    known = OPERATIONS if isinstance(op, MPI.Op) else ()
    return next((name for name in known if op == getattr(MPI, name.upper(), None)), op)


@dataclass(frozen=True)
class Operation:
    """A reduction operation on one dtype, applied in the order of the ranks.

    The result of ranks 0, 1, 2 is ``(x0 op x1) op x2``, for all sizes and backends. `max` and `min`
    propagate NaN as `numpy.maximum` does; integers wrap; logical operations give 0 and 1.

    C knows it as `key`, kernels as `kernel_options`: ``NUMBER`` is a type of numbers.cuh, and
    ``COMBINE`` the row's expression, which `combine` of elements.cuh has.
    """

    name: str
    dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        names = ", ".join(map(repr, OPERATIONS))
        is_str = isinstance(self.name, str)
        if not is_str or self.name not in OPERATIONS:
            kind = ValueError if is_str else TypeError
            raise kind(f"op must be one of {names}, or such an MPI.Op, not {self.name!r}")
        number = number_of(self.dtype)
        if number is None:
            raise TypeError(
                f"elements of dtype {self.dtype} cannot be reduced: those of {', '.join(NUMBERS)} "
                "can, in the byte order of the machine (bfloat16 where ml_dtypes is installed)"
                f"{as_numbers(self.dtype)}"
            )
        kinds = OPERATIONS[self.name].kinds
        if number.kind not in kinds:
            reason = _TAKES.get(kinds) or _REFUSED[number.kind]
            raise TypeError(reason.format(self.name))

    @property
    def number(self) -> Number:
        return NUMBERS[self.dtype.name]

    @property
    def key(self) -> str:
        number = "uint8" if self.number.kind == "b" else self.number.name  # 0 and 1 stay such
        return f"{self.name} {number}"

    @property
    def kernel_options(self) -> tuple[str, ...]:
        number, row = self.number, OPERATIONS[self.name]
        if number.kind == "i" and not row.heeds_signs:
            number = NUMBERS[number.added_as]
        return f"-DNUMBER={number.kernel}", f"-DCOMBINE={row.kernel}"

    def fold(self, operands: Sequence[Any], out: Any) -> None:
        """Combine two NumPy arrays or more in their order. `out` may be one of the first two."""
        combine = OPERATIONS[self.name].combine
        first, second, *rest = operands
        combine(first, second, out=out)
        for operand in rest:
            combine(out, operand, out=out)


def blocks_of(x: Any, y: Any) -> Iterator[tuple[Any, Any]]:
    """Yield contiguous rows that together have the elements of two arrays of one shape."""
    contiguous: Any = [["readonly", "contig"]] * 2  # NumPy's stubs lack the latter
    flags: Any = ["external_loop", "buffered", "zerosize_ok"]
    yield from np.nditer((x, y), flags, contiguous, buffersize=BLOCK)


def quiet_runner() -> Callable[..., Any]:
    """Return ``run(function, *arguments)``: without NumPy's warnings, for any errstate of the user.

    A reduction must end alike on all ranks and backends: an overflow gives inf, not an exception on
    those ranks that happen to add these elements. Entering `numpy.errstate` takes longer than
    adding a few numbers, so it is set once, in a context of its own.
    """
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":
        return _run_with_errstate  # there it belongs to the thread, not to the context
    context = copy_context()
    context.run(np.seterr, all="ignore")
    return context.run


def _run_with_errstate(function: Callable[..., Any], *arguments: Any) -> Any:
    with np.errstate(all="ignore"):
        return function(*arguments)

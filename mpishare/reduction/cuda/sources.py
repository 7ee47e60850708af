"""The compiler options of the kernels for a dtype and an operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishare.reduction.cuda.records import SIZE_OPTIONS

if TYPE_CHECKING:
    from mpishare.reduction.cuda.records import Form
    from mpishare.reduction.operation import Operation

_FLOATS = {"e": "Half", "f": "float", "d": "double", "F": "Complex<float>", "D": "Complex<double>"}
_WORDS = {1: "char", 2: "short", 4: "int", 8: "long long"}
_OPERATIONS = {"sum": "SUM", "prod": "PROD", "max": "MAX", "min": "MIN"}


def options(operation: Operation, nranks: int, form: Form) -> tuple[str, ...]:
    """Return the compiler options of a kernel; `form` is a `records.Form`."""
    dtype = operation.dtype
    number = _FLOATS.get(dtype.char)
    if number is None:
        # Sums and products of signed integers wrap as those of unsigned ones, by definition.
        is_signed = dtype.kind == "i" and operation.name in ("max", "min")
        number = f"{'signed' if is_signed else 'unsigned'} {_WORDS[dtype.itemsize]}"
    return (
        "--std=c++17",
        "--fmad=false",
        f"-DNUMBER={number}",
        f"-DOPERATION={_OPERATIONS[operation.name]}",
        f"-DRANKS={nranks}",
        f"-DFORM={form}",
        *SIZE_OPTIONS,
    )

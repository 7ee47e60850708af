"""The reduction operations and their dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

_UFUNCS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
_DTYPES = frozenset(np.dtype(code) for code in "?bhilqBHILQefdFD")


@dataclass(frozen=True)
class Operation:
    """A reduction operation on one dtype, applied in the order of the ranks.

    The result of ranks 0, 1, 2 is ``(x0 op x1) op x2``, for all sizes and backends. `max` and `min`
    propagate NaN as `numpy.maximum` does; integers wrap.
    """

    name: str
    dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        names = ", ".join(map(repr, _UFUNCS))
        if not isinstance(self.name, str):
            raise TypeError(f"op must be one of {names}, not {self.name!r}")
        if self.name not in _UFUNCS:
            raise ValueError(f"op must be one of {names}, not {self.name!r}")
        dtype = self.dtype
        if dtype not in _DTYPES or not dtype.isnative:
            raise TypeError(
                f"elements of dtype {dtype} cannot be reduced: float16 to float64, complex64 and "
                "complex128, integers and bool can, in the byte order of the machine"
            )
        if dtype.kind == "c" and self.name in ("max", "min"):
            raise TypeError(
                f"complex numbers have no {self.name}: reduce their absolute values, or the real "
                "and the imaginary parts as floats, x.view(float)"
            )
        if dtype.kind == "b" and self.name in ("sum", "prod"):
            raise TypeError(
                f"bool elements have no {self.name}: take 'max' for whether any is true, 'min' for "
                "whether all are, or count them as integers, x.astype(int)"
            )

    @property
    def ufunc(self) -> np.ufunc:
        """The operation on NumPy arrays: ``ufunc(first, second, out=result)``."""
        return _UFUNCS[self.name]

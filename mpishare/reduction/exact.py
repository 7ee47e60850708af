"""Sums that are rounded once, from the exact value: the same bits for any ranks, in any order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.memory.memory import address_of
from mpishare.reduction import integers
from mpishare.reduction.integers import WORDS
from mpishare.reduction.operation import Operation, blocks_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    Array = np.ndarray[Any, Any]

SUM_OF_WORDS = Operation("sum", np.dtype(np.int64))
"""Combines the words of ranks; those of a sum are what is combined in place of the elements."""


@dataclass(frozen=True)
class ExactOperation(Operation):
    """The exact sum, rounded once; numbers of 16 bits are rounded to 32 first."""

    compiled: Any = None  # the extension module, or None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name != "sum" or self.number.kind not in "fc":
            is_rounded = self.name == "prod" and self.number.kind in "fc"
            raise TypeError(
                f"exact=True is for sums of floats and complex numbers: {self.name!r} of "
                f"{self.dtype} "
                + ("has no exact form" if is_rounded else "does not depend on the ranks anyhow")
            )

    @property
    def key(self) -> str:
        return f"exact {self.number.added_as}"

    @property
    def kernel_options(self) -> tuple[str, ...]:
        return *super().kernel_options, "-DEXACT"

    @cached_property
    def real(self) -> np.dtype[Any]:
        """The dtype of what is rounded: of the parts of complex numbers."""
        return np.dtype(f"f{self.dtype.itemsize // 2}") if self.dtype.kind == "c" else self.dtype

    @property
    def nwords(self) -> int:
        """Words of one result: a row for each of its parts."""
        return WORDS * (self.dtype.itemsize // self.real.itemsize)

    @cached_property
    def _is_float(self) -> bool:
        return self.real.itemsize < 8

    def fold(self, operands: Sequence[Array], out: Array) -> None:
        packed = [np.ascontiguousarray(each).reshape(-1).view(self.real) for each in operands]
        if self.compiled is not None and self.compiled.can_reduce(self.key):
            total = np.empty_like(packed[0])
            addresses = tuple(map(address_of, packed))
            self.compiled.fold(self.key, address_of(total), addresses, total.size)
        else:
            wide = [each.astype(np.float64) for each in packed]
            total = integers.fold(wide, self._is_float)
            total = (total.astype(np.float32) if self._is_float else total).astype(self.real)
        out[...] = total.view(self.dtype).reshape(out.shape)

    def store_dot(self, words: Array, x: Array, y: Array) -> None:
        words[...] = 0
        are_doubles = self.dtype == np.float64 and self.compiled is not None
        if are_doubles and x.flags.c_contiguous and y.flags.c_contiguous:
            self.compiled.add_exactly(words, x, y)
            return
        rows = list(words.reshape(-1, WORDS))
        for a, b in blocks_of(x, y):
            for row, (p, q) in zip(rows, self._factors(a, b), strict=True):
                if self.compiled is None:
                    integers.add_terms(row, p, q)
                else:
                    self.compiled.add_exactly(row, p, q)

    def _factors(self, a: Array, b: Array) -> list[tuple[Array, Array | None]]:
        """Return doubles for each row of words: factors, or products of shorter numbers."""
        pairs = [(a.view(self.real), b.view(self.real))]
        if self.real != self.dtype:
            turned = np.empty_like(b)
            turned.real, turned.imag = b.imag, -b.real
            pairs.append((a.view(self.real), turned.view(self.real)))
        if self._is_float:
            return [(np.multiply(p, q, dtype=np.float64), None) for p, q in pairs]
        return [*pairs]

    def round(self, words: Array, out: Array) -> None:
        rounded = integers.rounded if self.compiled is None else self.compiled.round_exactly
        # A float of 32 bits, which the parts of the result hold, or round once more.
        first, *second = (rounded(row, self._is_float) for row in words.reshape(-1, WORDS))
        out[...] = complex(first, *second) if second else first

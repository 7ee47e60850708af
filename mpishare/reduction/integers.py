"""Exact sums by Python's integers: what `mpishare.native` has in C, shorter, and slower."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    Array = np.ndarray[Any, Any]

DIGITS, LOWEST = 136, -2176
POSITIVE, NEGATIVE, NEGATIVE_ZEROS, TERMS = range(DIGITS, DIGITS + 4)
WORDS = DIGITS + 4
"""The words of a row: digits of 32 bits, kept in 64, from that of 2^LOWEST on; the numbers of terms
that are +inf, -inf (a NaN counts as both) and -0.0, and of all. `native/words.h` has the same.
"""


def add_terms(row: Array, x: Array, y: Array | None) -> None:
    """Add the products of doubles, or the elements of x without y, to a row of words."""
    y = np.ones_like(x) if y is None else y
    product, is_finite = x * y, np.isfinite(x) & np.isfinite(y)
    row[POSITIVE] += np.count_nonzero(~is_finite & ~(product < 0))
    row[NEGATIVE] += np.count_nonzero(~is_finite & ~(product > 0))
    is_zero = (x == 0) | (y == 0)
    row[NEGATIVE_ZEROS] += np.count_nonzero(is_zero & (product == 0) & np.signbit(product))
    row[TERMS] += x.size
    (a, of_a), (b, of_b) = np.frexp(x[is_finite]), np.frexp(y[is_finite])
    integers = (np.ldexp(each, 53).astype(np.int64).tolist() for each in (a, b))
    shifts = (of_a.astype(int) + of_b - LOWEST).tolist()
    total = sum(p * q << shift for p, q, shift in zip(*integers, shifts, strict=True)) >> 106
    digits = np.frombuffer(abs(total).to_bytes(4 * DIGITS, "little"), "<u4").astype(np.int64)
    row[:DIGITS] += digits if total > 0 else -digits


def rounded(row: Array, is_float: bool) -> float:
    """Return the float, or the double, next to what a row stands for."""
    if row[POSITIVE] or row[NEGATIVE]:
        both = row[POSITIVE] and row[NEGATIVE]
        return math.nan if both else math.inf if row[POSITIVE] else -math.inf
    total = sum(digit << 32 * at for at, digit in enumerate(row[:DIGITS].tolist()))
    if total == 0:
        return -0.0 if row[TERMS] and row[TERMS] == row[NEGATIVE_ZEROS] else 0.0
    precision, least, most = (24, -149, 128) if is_float else (53, -1074, 1024)
    unit = max(total.bit_length() - precision, least - LOWEST)
    kept = round(Fraction(abs(total), 1 << unit))  # of two that are next to it, the even one
    overflows = kept.bit_length() + unit + LOWEST > most
    size = math.inf if overflows else math.ldexp(kept, unit + LOWEST)
    return size if total > 0 else -size


def fold(operands: Sequence[Array], is_float: bool) -> Array:
    """Return the correctly rounded sums of the elements of rows of doubles."""
    high, low = np.full(operands[0].size, -0.0), np.zeros(operands[0].size)
    is_left = np.zeros(high.size, bool)
    for operand in operands:
        high, rest = _two_sum(high, operand)
        low, rest = _two_sum(low, rest)
        is_left |= rest != 0  # as NaN is, beyond the range of doubles
    total, rest = _two_sum(high, low)
    # What is no double may be rounded twice, and a zero that is left of others has lost its sign.
    is_left |= ((total == 0) & (high != 0)) | ((rest != 0) & is_float)
    total = np.where(low == 0, high, total)
    for at in np.flatnonzero(is_left):
        row = np.zeros(WORDS, np.int64)
        add_terms(row, np.array([operand[at] for operand in operands]), None)
        total[at] = rounded(row, is_float)
    return total


def _two_sum(x: Array, y: Array) -> tuple[Array, Array]:
    """Return sums of doubles, and what they lack."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)

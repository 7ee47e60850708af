"""What an exact sum must be, by rational numbers, and terms that are hard to add."""

import math
from fractions import Fraction

import numpy as np

CASES = ("alike", "wide", "cancels", "tiny", "huge", "special", "zeros", "negative zeros", "ties")


def factors(case: str, seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Those of a dot product, in doubles; every rank has all of them by the seed."""
    rng = np.random.default_rng([seed, count, CASES.index(case)])
    width = {"alike": 3, "wide": 900}.get(case, int(rng.choice([0, 20, 60, 300])))
    exponents = rng.integers(-width, width + 1, (2, count))
    x, y = np.clip(np.ldexp(rng.standard_normal((2, count)), exponents), -1.7e308, 1.7e308)
    half, some = count // 2, rng.integers(0, count, count // 5 + 1)
    if case == "cancels":
        x[half : 2 * half], y[half : 2 * half] = -x[:half], y[:half]
    elif case == "tiny":
        x, y = x * 2.0**-700, y * 2.0 ** -int(rng.integers(200, 420))
    elif case == "huge":
        x, y = rng.choice([1.7e308, -1.7e308, 8.9e307], count), rng.choice([1.0, 0.5], count)
    elif case == "special":
        x[some] = rng.choice([np.inf, -np.inf, np.nan, 0.0], some.size)
        y[some[:1]] = rng.choice([0.0, 1.0])
    elif case == "zeros":
        x[some], y[some[::-1]] = 0.0, -0.0
    elif case == "negative zeros":
        x[:], y[:] = -0.0, 1.0
    elif case == "ties":
        x, y = np.exp2(rng.integers(-3, 3, count)), np.ones(count)
        y[0] = 2.0**-54 * rng.choice([1, -1, 1 + 2.0**-50])
    return x, y


def part(array: np.ndarray, seed: int, rank: int, size: int) -> np.ndarray:
    """A rank's part, of any size, of an array that all ranks have."""
    rng = np.random.default_rng([seed, size])
    ends = np.sort(rng.integers(0, array.size + 1, size - 1))
    return np.split(array, ends)[rank].copy()


def exact_dot(x: np.ndarray, y: np.ndarray, dtype="f8") -> np.ndarray:
    """The sum of conj(x) * y, rounded once, as an array of shape ()."""
    if x.dtype.kind != "c":
        return rounded_sum([(x, y)], dtype)
    real = np.dtype(f"f{x.dtype.itemsize // 2}")
    parts = np.empty((), x.dtype)
    parts.real = rounded_sum([(x.real, y.real), (x.imag, y.imag)], real)
    parts.imag = rounded_sum([(x.real, y.imag), (x.imag, -y.real)], real)
    return parts


def rounded_sum(products: list[tuple[np.ndarray, np.ndarray]], dtype) -> np.ndarray:
    """The sum of all products, rounded once; to 32 bits first where the dtype has 16."""
    x, y = (np.concatenate([np.asarray(each[k], "f8") for each in products]) for k in (0, 1))
    with np.errstate(all="ignore"):
        is_finite = np.isfinite(x) & np.isfinite(y)
        if not is_finite.all():
            found = np.sign(x) * np.sign(y) * np.inf
            return np.array(found[~is_finite].sum(), dtype)
    pairs = zip(x.tolist(), y.tolist(), strict=True)
    total = sum((Fraction(a) * Fraction(b) for a, b in pairs), Fraction(0))
    is_negative = ((x == 0) | (y == 0)) & (np.signbit(x) != np.signbit(y))
    if total == 0:
        return np.array(-0.0 if x.size and is_negative.all() else 0.0, dtype)
    return np.array(nearest(total, "f8" if np.dtype(dtype) == "f8" else "f4")).astype(dtype)


def nearest(value: Fraction, dtype) -> np.floating:
    """The number of a dtype next to a rational one; of two, that with an even last bit."""
    kind, size = np.dtype(dtype).type, abs(value)
    digits, least = (53, -1074) if dtype == "f8" else (24, -149)
    about = float(min(size, Fraction(2) ** 1023))
    unit = Fraction(2) ** max(math.frexp(about)[1] - digits, least)
    with np.errstate(over="ignore"):
        try:
            found = kind(float(round(size / unit) * unit))
        except OverflowError:
            found = kind(np.inf)
    return found if value > 0 else -found

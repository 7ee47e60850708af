"""Numbers that are hard to round, and what they become, by integers alone."""

import numpy as np

WIRES = {"float32": (24, -149, 128), "float16": (11, -24, 16), "bfloat16": (8, -133, 128)}
"""Bits of the mantissa, the exponents of the least number and of the first that is too large."""
PAIRS = [(dtype, wire) for dtype in ("f8", "f4", "c16", "c8") for wire in WIRES]
PAIRS = [(dtype, wire) for dtype, wire in PAIRS if dtype in ("f8", "c16") or wire != "float32"]


def reals(array: np.ndarray) -> np.ndarray:
    """The numbers of an array, complex ones as two."""
    array = np.ascontiguousarray(array)
    return array.view(f"f{array.itemsize // (1 + (array.dtype.kind == 'c'))}")


@np.errstate(all="ignore")
def rounded(array: np.ndarray, wire: str) -> np.ndarray:
    """Each number rounded to nearest, ties to even, in its own dtype."""
    digits, least, end = WIRES[wire]
    numbers = reals(array)
    wide = np.where(np.isfinite(numbers), numbers, 0).astype("f8")
    exponents = np.maximum(np.frexp(wide)[1] - digits, least)
    found = np.ldexp(np.rint(np.ldexp(wide, -exponents)), exponents)
    found[abs(found) >= 2.0**end] *= np.inf
    return np.where(np.isfinite(numbers), found, numbers).astype(numbers.dtype).view(array.dtype)


@np.errstate(all="ignore")
def hard(rng: np.random.Generator, count: int, dtype: str, wire: str) -> np.ndarray:
    """Any bits, ties and the numbers beside them, of all sizes that the wire has and of others."""
    real = {"f8": "f8", "c16": "f8", "f4": "f4", "c8": "f4"}[dtype]
    count *= 1 + (dtype[0] == "c")
    digits, least, end = WIRES[wire]
    anything = rng.integers(0, 256, count * int(real[1]), np.uint8).view(real)
    # Odd multiples of half a unit in the last place; below `least` units are of one size.
    halves = 2 * rng.integers(0, 1 << digits, count) + 1
    ties = np.ldexp(halves, rng.integers(least - 3, end, count) - digits).astype(real)
    ties[::3] = np.ldexp(halves[::3] % 64, least - 1)  # denormals
    ties = np.nextafter(ties, ties * rng.choice([0.5, 1, 2], count).astype(real))
    signs = rng.choice([-1, 1], count).astype(real)
    found = np.where(rng.random(count) < 0.3, anything, ties * signs)
    few = [0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**end, 2.0**end * (1 - 2.0 ** (-digits - 1))]
    few += [2.0**least, 2.0 ** (least - 1), 2.0 ** (least - 1) * (1 + 2.0**-20), 1.0]
    some = rng.random(count) < 0.2
    found[some] = rng.choice(np.array(few).astype(real), some.sum())
    return found.view(dtype)


def differ(found: np.ndarray, right: np.ndarray) -> int:
    """How many numbers differ in a bit; one NaN is as good as another."""
    found, right = reals(found), reals(right)
    bits = f"u{found.itemsize}"
    same = (found.view(bits) == right.view(bits)) | (np.isnan(found) & np.isnan(right))
    return int((~same).sum())


def rows(node, n: int, dtype: str, wire: str, step: int) -> list[np.ndarray]:
    """Four rows of hard numbers of each rank, the same on all ranks."""
    seed = [n, step, *wire.encode(), *dtype.encode()]
    return [
        hard(np.random.default_rng([*seed, rank]), 4 * n, dtype, wire).reshape(4, n)
        for rank in range(node.size)
    ]


def wrong(node, u, of_all: list[np.ndarray], wire: str) -> int:
    """How many numbers of a block of a ring are not what an exchange must leave."""
    found = u.get() if hasattr(u, "get") else u
    mine, before, after = (of_all[(node.rank + step) % node.size] for step in (0, -1, 1))
    ghosts = differ(found[0], rounded(before[2], wire)) + differ(found[3], rounded(after[1], wire))
    return ghosts + differ(found[1:3], mine[1:3])

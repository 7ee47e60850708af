"""What a reduction must give, by NumPy, in the order of the ranks; every rank knows it by itself.

Needs no pytest, so that scenes of the fault tests use it too.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np

from mpishare.reduction.operation import OPERATIONS, Operation


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Complex numbers are multiplied by their parts, each product and sum rounded alone."""
    if a.dtype.kind != "c":
        return a * b
    found = np.empty_like(a)
    found.real = a.real * b.real - a.imag * b.imag
    found.imag = a.real * b.imag + a.imag * b.real
    return found


ARITHMETIC = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": multiply}
OF_BITS = {
    "land": np.logical_and,
    "lor": np.logical_or,
    "lxor": np.logical_xor,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
UFUNCS = ARITHMETIC | OF_BITS
INTS = ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")
FLOATS = ("f2", "f4", "f8")
COMPLEX = ("c8", "c16")
FORMS = ("C", "F", "strided", "turned")


def pairs() -> list[tuple[str, str]]:
    """Every operation with every dtype that it takes, of those on bits with some."""
    found = [(op, dtype) for op in ARITHMETIC for dtype in (*INTS, *FLOATS)]
    found += [(op, dtype) for op in OF_BITS for dtype in ("?", "i1", "u4", "u8")]
    found += [(op, dtype) for op in ("sum", "prod") for dtype in COMPLEX]
    found += [(op, dtype) for op in ("maxloc", "minloc") for dtype in COMPLEX]
    return [*found, ("max", "?"), ("min", "?")]


def every_operation(codes: str) -> Iterator[Operation]:
    """Yield every operation on numbers of these codes of dtypes."""
    for code, name in product(codes, OPERATIONS):
        with contextlib.suppress(TypeError):
            yield Operation(name, np.dtype(code))


def values(dtype: str, shape: tuple[int, ...], rank: int, seed: int = 0) -> np.ndarray:
    """Those of one rank: their sum depends on the order in which they are added."""
    rng = np.random.default_rng([seed, rank, 5])
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if kind.kind in "iu":
        info = np.iinfo(kind)
        return rng.integers(info.min, info.max, shape, kind, endpoint=True)
    parts = rng.standard_normal((2, *shape)) * 10.0 ** rng.integers(-3, 3, (2, *shape))
    return (parts[0] + (1j * parts[1] if kind.kind == "c" else 0)).astype(kind)


def folded(op: str, arrays: list[np.ndarray]) -> np.ndarray:
    """Their combination, the first with the second, that with the third."""
    if op in ("maxloc", "minloc"):
        return located(op, np.stack(arrays))
    with np.errstate(all="ignore"):
        return functools.reduce(UFUNCS[op], arrays).astype(arrays[0].dtype)


def results_of_nodes(stage, node) -> tuple[list[list[int]], Callable[..., np.ndarray]]:
    """The ranks of each node; and the function of op, dtype, shape and seed of their result."""
    nodes: dict[int, list[int]] = {}
    for rank, first in stage.gather((stage.rank, node.ranks[0])):
        nodes.setdefault(first, []).append(rank)
    groups = [nodes[first] for first in sorted(nodes)]

    def right(op, dtype, shape, seed):
        parts = [[values(dtype, shape, rank, seed) for rank in group] for group in groups]
        return folded(op, [folded(op, part) for part in parts])

    return groups, right


def located(op: str, each: np.ndarray) -> np.ndarray:
    """The first of all, sorted: NaNs, then the most extreme values, then the lowest indices."""
    is_nan, sign = np.isnan(each.real), -1 if op == "maxloc" else 1
    order = np.lexsort((each.imag, np.where(is_nan, 0, sign * each.real), ~is_nan), axis=0)
    return np.take_along_axis(each, order[:1], axis=0)[0]


def expected(op: str, dtype: str, shape: tuple[int, ...], size: int, seed: int = 0) -> np.ndarray:
    """What `size` ranks get."""
    return folded(op, [values(dtype, shape, rank, seed) for rank in range(size)])


def base_shape(shape: tuple[int, ...], form: str) -> tuple[int, ...]:
    """That of the memory around an array of a form: in another order, or with gaps."""
    return {
        "F": lambda: shape[::-1],
        "turned": lambda: shape[1:] + shape[:1],
        "strided": lambda: tuple(2 * extent + 1 for extent in shape),
        "offset": lambda: tuple(extent + 3 for extent in shape),
    }.get(form, lambda: shape)()


def carve(base, form: str):
    """The array in the memory around it."""
    return {
        "F": lambda: base.T,
        "turned": lambda: base.transpose(-1, *range(base.ndim - 1)),
        "strided": lambda: base[(slice(1, None, 2),) * base.ndim],
        "offset": lambda: base[(slice(2, -1),) * base.ndim],
    }.get(form, lambda: base)()


def laid_out(xp, array: np.ndarray, form: str):
    """The same elements in memory of their own, in another order or with gaps."""
    array = xp.asarray(array)
    form = form if array.ndim else "C"
    view = carve(xp.zeros(base_shape(array.shape, form), array.dtype), form)
    view[...] = array
    return view


def on_host(array) -> np.ndarray:
    """Its values in host memory, when the GPU has come so far."""
    return array.get() if hasattr(array, "get") else np.asarray(array)

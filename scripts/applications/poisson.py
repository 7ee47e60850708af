"""Poisson's equation in a box, solved by conjugate gradients: what a rank does with its own block.

The 7-point Laplacian in float64, zero outside of the box, which a cart cuts into one block per
rank. A pass of the method takes three kernels and two sums over the ranks, of one number each; the
scalars stay where the fields are. What lies between the kernels is up to who calls them::

    descend()   # r -= alpha q; rr = r . r of this rank
                # rr = sum of all ranks
                # here the ghosts of r begin to travel
    turn()      # x += alpha p; p = r + beta p; done = whether |r| is small enough
                # here the ghosts of r have come
    multiply()  # the same p in the ghosts; q = A p; pq = p . q of this rank
                # pq = sum of all ranks

So the ghosts travel beside a kernel. ``begin`` sets the fields such that the first pass
finds p = r. Once ``done`` is set x is good enough, and passes that follow make it no worse.
"""

from __future__ import annotations

import math
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

    from mpishare import Node

    Array = Any
    Box = tuple[slice, ...]

#: As in poisson.cu.
_GRID = np.dtype([(name, np.int32) for name in ("nx", "ny", "nz", "row", "plane", "faces")])


_SCALARS = ("rr", "pq", "previous", "tolerance", "limit", "passes", "done")


_LANES, _ROWS, _PAIR = 32, 8, 2


_PLANES, _MARCH = 2, 8


#: Cells of a line of memory: owned rows begin with one.
_LINE = 16


#: Bumps of the solution: their centre, as parts of the axes, and their width.
_BUMPS = ((0.3, 0.4, 0.6), (0.7, 0.2, 0.5), (0.5, 0.8, 0.3))


_WIDTH = 0.15


class Poisson:
    """The fields of a rank, and the kernels on them: see `poisson`, which makes one.

    All calls are local and, on CUDA, stream-ordered.

    Attributes
    ----------
    x, b, r, p, q : array
        The solution, the right-hand side, the residual, the direction and its product with the
        matrix, each with one ghost on every side. `r` is in a window.
    rr, pq, passes, done : array of one element
        The scalars, see above; how many passes were made, and whether the last one was `done`.
    rows : dict of str to array
        For each field the whole rows in which it lies, from which its ghosts are copied in a piece.
    owned, owned_in_rows : tuple of slice
        The cells of a field that are no ghosts, in the field and in its rows.
    """

    def __init__(self, node: Node, cart: MPI.Cartcomm, shape: Sequence[int]) -> None:
        self.node, self.cart, self.shape = node, cart, tuple(shape)
        xp = self.xp = node.xp
        whole = _padded(self.shape)
        self._window = node.allocate_each(whole, float, fill=0)
        self.rows = {name: xp.zeros(whole) for name in "xbpq"} | {"r": self._window.array}
        cut = slice(_LINE - 1, _LINE + 1 + self.shape[2])
        self.x, self.b, self.r, self.p, self.q = (self.rows[name][..., cut] for name in "xbrpq")
        self.owned: Box = tuple(slice(1, n + 1) for n in self.shape)
        self.owned_in_rows: Box = (*self.owned[:2], slice(_LINE, _LINE + self.shape[2]))
        self._state = xp.zeros(len(_SCALARS))
        self.rr, self.pq, self._previous, self._tolerance, self._limit, passes, done = (
            self._state[i : i + 1] for i in range(len(_SCALARS))
        )
        self.passes, self.done = passes.view("i8"), done.view("i4")[:1]
        #: Two solutions and their right-hand sides; `pose` makes others of them.
        self._parts = [_part(self, bumps) for bumps in (_BUMPS[:2], _BUMPS)]
        self._solution = xp.zeros(self.shape)
        self._wrong = xp.zeros((), "i8")

    @staticmethod
    def needed_nbytes(shape: Sequence[int]) -> int:
        """Return the memory of a rank for all fields."""
        return 8 * (5 * prod(_padded(shape)) + 8 * prod(shape))

    def pose(self, token: int) -> None:
        """Set the right-hand side; `token` says which."""
        weights = 1.0 + token % 7, 1.0 + token % 5
        (x, b), (y, c) = self._parts
        self.b[self.owned] = weights[0] * b + weights[1] * c
        self._solution[...] = weights[0] * x + weights[1] * y

    def forget(self) -> None:
        """Overwrite the solution."""
        self.x.fill(math.nan)

    def verify(self) -> None:
        """Count the cells of `x` that are not right to a millionth of the largest."""
        allowed = 1e-6 * abs(self._solution).max()
        is_right = abs(self.x[self.owned] - self._solution) <= allowed  # NaN is wrong
        self._wrong += self.xp.count_nonzero(~is_right)

    def wrong(self) -> int:
        """Return how many were wrong since the last call; waits for the GPU."""
        wrong = int(self._wrong)
        self._wrong.fill(0)
        return wrong

    def begin(self, tolerance: float) -> None:
        """Start from x = 0; `tolerance` is of the residual, as part of the right-hand side."""
        raise NotImplementedError

    def descend(self) -> None:
        """Take the step from the residual, and add up its squares."""
        raise NotImplementedError

    def turn(self) -> None:
        """Take the step of the solution, find the next direction, and whether it is needed."""
        raise NotImplementedError

    def multiply(self) -> None:
        """Bring the ghosts of the direction up to date, and multiply it by the matrix."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the window of the residual. Collective."""
        del self.r
        self.rows.clear()
        self._window.close()


class _OnHost(Poisson):
    def __init__(self, node: Node, cart: MPI.Cartcomm, shape: Sequence[int]) -> None:
        super().__init__(node, cart, shape)
        self._scratch = np.empty(self.shape)

    def begin(self, tolerance: float) -> None:
        for name in "xpq":
            self.rows[name].fill(0)
        self.rows["r"][...] = self.rows["b"]
        self.rr[0] = self.pq[0] = self._previous[0] = 1.0
        self._tolerance[0] = tolerance**2
        self.passes[0] = self.done[0] = 0

    def descend(self) -> None:
        r = self.r[self.owned]
        np.multiply(self.q[self.owned], self.rr[0] / self.pq[0], out=self._scratch)
        r -= self._scratch
        self._previous[0] = self.rr[0]
        self.rr[0] = self._product(r, r)
        self.passes[0] += 1

    def turn(self) -> None:
        x, r, p = (field[self.owned] for field in (self.x, self.r, self.p))
        np.multiply(p, self._previous[0] / self.pq[0], out=self._scratch)
        x += self._scratch
        p *= self.rr[0] / self._previous[0]
        p += r
        if self.passes[0] == 1:
            self._limit[0] = self._tolerance[0] * self.rr[0]
        # Stays: the residual may grow again. Also where it is not a number.
        if not self.rr[0] > self._limit[0]:
            self.done[0] = 1

    def multiply(self) -> None:
        p, q, owned = self.p, self.q[self.owned], self.owned
        beta = self.rr[0] / self._previous[0]
        for axis, n in enumerate(self.shape):
            for place in (0, n + 1):
                face = (*owned[:axis], place, *owned[axis + 1 :])
                p[face] *= beta
                p[face] += self.r[face]
        _laplace(p, q)
        self.pq[0] = self._product(p[owned], q)

    def _product(self, a: Array, b: Array) -> float:
        np.multiply(a, b, out=self._scratch)
        return float(self._scratch.sum())


class _OnCuda(Poisson):
    def __init__(
        self, node: Node, cart: MPI.Cartcomm, shape: Sequence[int], *, may_fuse: bool
    ) -> None:
        super().__init__(node, cart, shape)
        rows, xp = self.rows, self.xp
        if rows["r"].size >= 2**31:
            raise ValueError("the kernels count cells in 32 bits: take fewer")
        nx, ny, nz = self.shape
        plane = -(-nz // (_PAIR * _LANES)), -(-ny // _ROWS)
        short, long = ((*plane, -(-nx // planes)) for planes in (_PLANES, _MARCH))
        # One structure: CuPy passes it by value.
        steps = [step // self.r.itemsize for step in self.r.strides]
        ranks = [rank for axis in range(3) for rank in cart.Shift(axis, 1)]
        faces = sum(1 << face for face, rank in enumerate(ranks) if rank >= 0)  # not PROC_NULL
        grid = np.array([(nx, ny, nz, steps[1], steps[0], faces)], _GRID)
        x, r, p, q = (getattr(self, name)[self.owned] for name in "xrpq")
        state, of_blocks = self._state, xp.zeros(max(prod(short), prod(long)))
        launches = {
            "descend": (short, (grid, q, r, state, of_blocks)),
            "turn": (short, (grid, r, p, x, state)),
            "multiply": (long, (grid, r, p, q, state, of_blocks)),
        }
        code = Path(__file__).with_suffix(".cu").read_text()
        # Where nothing is fused, as in NumPy, cells have the same bits.
        options = ("--std=c++17",) if may_fuse else ("--std=c++17", "--fmad=false")
        module = xp.RawModule(code=code, options=options)
        self._kernels: dict[str, Callable[[], None]] = {
            name: partial(module.get_function(name), blocks, (_LANES, _ROWS), arguments)
            for name, (blocks, arguments) in launches.items()
        }
        self._begin = module.get_function("begin")
        # Loading a kernel later would wait for whatever the stream waits for.
        self.begin(0.0)
        for name in launches:
            self._kernels[name]()

    def begin(self, tolerance: float) -> None:
        fields = (self.rows[name] for name in "bxrpq")
        scalars = np.int32(self.rows["r"].size), self._state, np.float64(tolerance**2)
        self._begin((1024,), (256,), (*fields, *scalars))

    def descend(self) -> None:
        self._kernels["descend"]()

    def turn(self) -> None:
        self._kernels["turn"]()

    def multiply(self) -> None:
        self._kernels["multiply"]()

    def close(self) -> None:
        self._kernels.clear()
        super().close()


def poisson(
    node: Node, cart: MPI.Cartcomm, shape: Sequence[int], *, may_fuse: bool = True
) -> Poisson:
    """Make the problem of a rank. Collective over the node.

    Parameters
    ----------
    node : Node
        Its backend says where the fields are.
    cart : MPI.Cartcomm
        Of three axes, without periods.
    shape : sequence of int
        Owned cells of a rank along each axis, the same on every rank.
    may_fuse : bool
        Whether kernels may round a product and a sum at once. If not, the cells have the same bits
        on GPUs and on hosts.
    """
    if node.backend == "cuda":
        return _OnCuda(node, cart, shape, may_fuse=may_fuse)
    return _OnHost(node, cart, shape)


def _padded(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the extents of whole rows."""
    return shape[0] + 2, shape[1] + 2, -(-(_LINE + 1 + shape[2]) // _LINE) * _LINE


def _laplace(u: Array, out: Array) -> None:
    """Set `out` to 6 u less its neighbors, where `u` has one ghost on every side."""
    owned = tuple(slice(1, n - 1) for n in u.shape)
    out[...] = u[owned]
    out *= 6
    for axis in range(3):
        for shift in (0, 2):
            cells = slice(shift, shift + out.shape[axis])
            out -= u[(*owned[:axis], cells, *owned[axis + 1 :])]


def _part(problem: Poisson, bumps: Sequence[Sequence[float]]) -> tuple[Array, Array]:
    """Return a solution and its right-hand side, for the cells of this rank."""
    xp, cart, shape = problem.xp, problem.cart, problem.shape
    with_ghosts = xp.zeros([n + 2 for n in shape])
    for centres in bumps:
        x, y, z = (
            xp.asarray(_profile(n * ranks, centre)[n * coord :][: n + 2])
            for n, ranks, coord, centre in zip(shape, cart.dims, cart.coords, centres, strict=True)
        )
        with_ghosts += x[:, None, None] * y[None, :, None] * z[None, None, :]
    right = xp.zeros(shape)
    _laplace(with_ghosts, right)
    return with_ghosts[1:-1, 1:-1, 1:-1].copy(), right


def _profile(n: int, centre: float) -> Any:
    """Return a bump along an axis of n cells, and the zeros outside of it."""
    at = np.arange(n + 2) / (n + 1)
    # In float32, since the last bits of NumPy's `exp` are those of the processor.
    bump = at * (1 - at) * np.exp(-(((at - centre) / _WIDTH) ** 2)).astype("f4")
    bump[[0, -1]] = 0
    return bump

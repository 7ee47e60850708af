"""Incompressible Navier-Stokes in a periodic box, in Fourier modes: what `spectral` is made of.

Products are made in space, where a rank has some planes of x; derivatives in modes, where it has
some of y. Between the two all components are turned at once, so that each Fourier transform is
local. Only modes that the 2/3 rule keeps are stored, and sent.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import transposes

import mpishare

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from mpi4py import MPI

    Array = Any  # numpy.ndarray or cupy.ndarray

PERMUTED = (0, 2, 3, 1)  # x last: contiguous for the transform along it


class Links(NamedTuple):
    """What turns fields of six and of three components."""

    six: Any
    three: Any


class Flow:
    """The box of n^3 points in float64, with sides of 2 pi.

    Attributes
    ----------
    u : array
        The modes of the velocity, with wavenumbers below n / 3 along each axis: three components of
        (x, y, z), or of (y, z, x) where they are permuted. This rank has some of y.
    """

    def __init__(self, args: argparse.Namespace, cart: MPI.Cartcomm, node: mpishare.Node) -> None:
        self.cart, self.node, self.xp = cart, node, node.xp
        self.n = n = args.cells
        self.m = m = modes(n)
        self.nu, self.dt = 1 / args.re, 1 / n
        self.permute = PERMUTED if args.permute else None
        self.links = self.make_links(args.staged)
        self.rows = transposes.planes(n, cart.size, 1)[cart.rank][1]
        columns = transposes.planes(2 * m - 1, cart.size, 2)[cart.rank][2]
        order = [axis - 1 for axis in (self.permute or range(4))[1:]]
        self.x = 1 + order.index(0)  # the axis of a field in modes that is x

        def along(axis: int, values: np.ndarray) -> Array:
            shape = [1, 1, 1]
            shape[order.index(axis)] = len(values)
            return self.xp.asarray(values.reshape(shape))

        of_x, of_z = wavenumbers(m), np.arange(m, dtype=float)
        self.k = [along(0, of_x), along(1, of_x[columns]), along(2, of_z)]
        self.ik = [1j * k for k in self.k]
        self.k2 = sum(k * k for k in self.k)
        self.over_k2 = 1 / self.xp.where(self.k2 == 0, 1, self.k2)
        self.friction = self.nu * self.k2
        self.copies = along(2, np.where(of_z == 0, 1.0, 2.0))  # of a mode: that of -k is not stored
        self.cross, self.change, self.advance = (
            fused(self.xp, each) for each in (cross, change, advance)
        )
        self.u = self.to_modes(self.xp.asarray(vortex(n, self.rows)), self.links)

    def make_links(self, form: str | None) -> Links:
        """Make what turns fields: by mpishare, or as it is written without it. Collective."""
        cart, node, permute = self.cart, self.node, self.permute
        shapes = [(components, self.n, 2 * self.m - 1, self.m) for components in (6, 3)]
        if form:
            kind = transposes.FORMS[form]
            return Links(*(kind(cart, shape, permute, node) for shape in shapes))
        return Links(
            *(
                mpishare.Redistribute(cart, shape, 1, 2, complex, permute=permute, node=node)
                for shape in shapes
            )
        )

    def begin(self) -> None:
        """Set the velocity to that of the vortex. Collective."""
        self.u[...] = self.to_modes(self.xp.asarray(vortex(self.n, self.rows)), self.links)

    def to_modes(self, f: Array, links: Links) -> Array:
        """Return the modes of three fields in space."""
        f = self.xp.fft.rfftn(f, axes=(2, 3), norm="forward")[..., : self.m]
        f = links.three.forward(keep(self.xp, f, self.m, 2))
        return keep(self.xp, self.xp.fft.fft(f, axis=self.x, norm="forward"), self.m, self.x)

    def to_space(self, f: Array, links: Links) -> Array:
        """Return six fields in space, of their modes."""
        n = self.n
        f = self.xp.fft.ifft(pad(self.xp, f, n, self.x), axis=self.x, norm="forward")
        f = pad(self.xp, links.six.backward(f), n, 2)
        return self.xp.fft.irfftn(f, s=(n, n), axes=(2, 3), norm="forward")

    def slope(self, u: Array, links: Links) -> Array:
        """Return du/dt = P(u x curl u) - nu k^2 u, where P removes the gradient of the pressure."""
        stack = self.xp.stack
        fields = self.to_space(stack((*u, *self.cross(*self.ik, *u))), links)
        force = self.to_modes(stack(self.cross(*fields)), links)
        return stack(self.change(*self.k, self.over_k2, self.friction, *force, *u))

    def step(self, u: Array, links: Links) -> None:
        """Make a step in place."""
        end, at, dt = u, u, self.dt
        for weight, ahead in ((1 / 6, 1 / 2), (1 / 3, 1 / 2), (1 / 3, 1), (1 / 6, 0)):
            slope = self.slope(at, links)
            end, at = self.advance(end, weight * dt, u, ahead * dt, slope)
        u[...] = end

    def stepper(self, links: Links, *, graph: bool) -> Callable[[], None]:
        """Return what makes a step: called, or captured into a graph."""
        if not graph:
            return lambda: self.step(self.u, links)
        captured = mpishare.capture(self.node, lambda u: self.step(u, links))
        return lambda: captured(self.u)

    def total(self, per_mode: Array) -> float:
        """Return the sum over all modes of all ranks. Collective."""
        return float(self.cart.allreduce(float((self.copies * per_mode).sum())))

    def energy(self) -> Array:
        """Return the kinetic energy of each mode."""
        return 0.5 * (self.u.real**2 + self.u.imag**2).sum(axis=0)

    def decay(self) -> tuple[float, float]:
        """Return the kinetic energy and its dissipation rate, 2 nu times the enstrophy."""
        energy = self.energy()
        return self.total(energy), 2 * self.nu * self.total(self.k2 * energy)

    def imbalance(self) -> float:
        """Return how far dE/dt is from the dissipation rate, as part of that."""
        slope, dissipation = self.slope(self.u, self.links), self.decay()[1]
        gain = self.total((self.u.real * slope.real + self.u.imag * slope.imag).sum(axis=0))
        return abs(gain + dissipation) / dissipation

    def divergence(self) -> float:
        """Return the largest k . u, as part of the largest |k| |u|."""
        xp = self.xp
        total: Any = sum(k * u for k, u in zip(self.k, self.u, strict=True))
        divergence = abs(total).max()
        largest = xp.sqrt(self.k2 * 2 * self.energy()).max()
        parts = self.cart.allgather((float(divergence), float(largest)))
        return max(part[0] for part in parts) / max(part[1] for part in parts)

    def spectrum(self) -> np.ndarray:
        """Return the energy of the shells of |k| = 0, 1, 2, ... . Collective."""
        shells = self.xp.rint(self.xp.sqrt(self.k2)).astype(int).ravel()
        length = math.isqrt(3 * self.m**2) + 1
        mine = self.xp.bincount(shells, (self.copies * self.energy()).ravel(), length)
        whole: np.ndarray = self.cart.allreduce(mine if self.xp is np else mine.get())
        return whole

    def whole(self) -> np.ndarray:
        """Return the velocity in space: all of it on rank 0, nothing elsewhere. Collective."""
        u = self.to_space(self.xp.concatenate((self.u, self.u)), self.links)[:3]
        to_rank_0 = mpishare.OnRank(0)
        with mpishare.Redistribute(
            self.cart, (3, self.n, self.n, self.n), 1, to_rank_0, node=self.node
        ) as plan:
            found = plan.forward(u)
            return found if self.xp is np else found.get()

    def close(self) -> None:
        """Close what turns fields. Collective."""
        for each in self.links:
            each.close()


def modes(n: int) -> int:
    """Return how many wavenumbers k >= 0 are kept of n points: products alias no k < n / 3."""
    return (n - 1) // 3 + 1


def wavenumbers(m: int) -> np.ndarray:
    """Return those of a whole axis as they are stored: 0 to m - 1, then 1 - m to -1."""
    return np.concatenate((np.arange(m), np.arange(1 - m, 0))).astype(float)


def keep(xp: Any, f: Array, m: int, axis: int) -> Array:
    """Return the modes with wavenumbers below m along an axis, from all of it."""
    before = (slice(None),) * axis
    cut = f.shape[axis] - m + 1
    return xp.concatenate((f[(*before, slice(m))], f[(*before, slice(cut, None))]), axis)


def pad(xp: Any, f: Array, n: int, axis: int) -> Array:
    """Return the modes of n points along an axis: zero where `keep` has removed them."""
    before, m = (slice(None),) * axis, (f.shape[axis] + 1) // 2
    whole = xp.zeros((*f.shape[:axis], n, *f.shape[axis + 1 :]), f.dtype)
    whole[(*before, slice(m))] = f[(*before, slice(m))]
    whole[(*before, slice(n - m + 1, None))] = f[(*before, slice(m, None))]
    return whole


def cross(ax: Array, ay: Array, az: Array, bx: Array, by: Array, bz: Array) -> Any:
    """Return the product of two vectors."""
    return ay * bz - az * by, az * bx - ax * bz, ax * by - ay * bx


def change(
    kx: Array,
    ky: Array,
    kz: Array,
    over_k2: Array,
    friction: Array,
    x: Array,
    y: Array,
    z: Array,
    u: Array,
    v: Array,
    w: Array,
) -> Any:
    """Return how a velocity changes: by the part of a force without divergence, and by friction."""
    along = (kx * x + ky * y + kz * z) * over_k2
    return (
        x - kx * along - friction * u,
        y - ky * along - friction * v,
        z - kz * along - friction * w,
    )


def advance(end: Array, weight: float, u: Array, ahead: float, slope: Array) -> Any:
    """Return the end of a step with this stage in it, and where the next stage begins."""
    return end + weight * slope, u + ahead * slope


def fused(xp: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as one kernel on a GPU."""
    return function if xp is np else xp.fuse()(function)


def vortex(n: int, rows: slice = slice(None)) -> np.ndarray:
    """Return the velocity of the Taylor-Green vortex in space, in these planes of x."""
    sine, cosine = (each(2 * np.pi * np.arange(n) / n) for each in (np.sin, np.cos))
    u = sine[rows, None, None] * cosine[:, None] * cosine
    v = -cosine[rows, None, None] * sine[:, None] * cosine
    return np.stack((u, v, np.zeros_like(u)))

"""The grid of a plan: that of a Cartcomm, or ``dims=`` and ``periods=`` on a plain communicator."""

from __future__ import annotations

from math import prod
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.halo.geometry import Grid

if TYPE_CHECKING:
    from mpi4py import MPI


def grid_of(comm: MPI.Intracomm, dims: Any, periods: Any) -> Grid:
    """Return the grid of the ranks of a Cartcomm, or of any communicator with `dims`.

    Ranks without a cart are numbered as MPI numbers those of a cart: row by row.
    """
    from mpi4py import MPI

    if isinstance(comm, MPI.Cartcomm):
        if dims is not None or periods is not None:
            raise ValueError(
                "cart is a Cartcomm, which has dims and periods of its own: leave out dims= and "
                "periods=, or give the communicator that the cart was made from"
            )
        extents, wraps, _ = comm.Get_topo()
        return Grid(tuple(extents), tuple(map(bool, wraps)))
    if dims is None:
        raise TypeError(
            f"cart must be a Cartcomm, not {type(comm).__name__}: make one with Create_cart, or "
            "name dims="
        )
    found = normalize_dims(dims, comm.size)
    if 0 in found:
        found = tuple(MPI.Compute_dims(comm.size, found))
    return Grid(found, normalize_periods(periods, len(found)))


def normalize_dims(dims: Any, size: int) -> tuple[int, ...]:
    """Return the extents of a grid of `size` ranks, or raise `ValueError`.

    Zeros stay: MPI chooses these extents, so that the product is `size`.
    """
    try:
        found = tuple(map(index, dims))
    except TypeError:
        found = ()
    if not found or min(found) < 0:
        raise ValueError(
            f"dims must be ints of 0 or more, one for each axis of the grid, not {dims!r}"
        )
    product = prod(filter(None, found))
    if product != size and (0 not in found or size % product):
        raise ValueError(
            f"dims {found} are a grid of {product} ranks, the communicator has {size}. "
            f"mpi4py.MPI.Compute_dims({size}, {len(found)}) finds dims that fit"
        )
    return found


def normalize_periods(periods: Any, naxes: int) -> tuple[bool, ...]:
    """Return whether each axis wraps, or raise `ValueError`.

    A bool is for all axes, None for no axis.
    """
    if periods is None or isinstance(periods, bool | np.bool_):
        return (bool(periods),) * naxes
    try:
        found = [int(each) if isinstance(each, np.bool_) else index(each) for each in periods]
    except TypeError:
        found = []
    if len(found) != naxes or not {0, 1}.issuperset(found):
        raise ValueError(
            f"periods must be a bool, or one for each axis of the grid ({naxes} here), not "
            f"{periods!r}"
        )
    return tuple(map(bool, found))

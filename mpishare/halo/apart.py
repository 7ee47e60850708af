"""Whether the fields of a plan are apart: as buffers that MPI receives into must be."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.halo.layout import as_list, as_numpy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.halo.layout import Layout

_MOST_WORK = 100_000  # milliseconds; a few steps settle what programs have


def require_apart(fields: Any, layouts: Sequence[Layout]) -> None:
    """Raise `ValueError` if an element of one field is one of another, too. Local.

    Components that lie in turns in one array are apart: ``q[..., 0]`` and ``q[..., 1]``.
    """
    if len(layouts) == 1:
        return
    views = [
        _View(address, layout).array()
        for address, layout in zip(_addresses(as_list(fields), layouts), layouts, strict=True)
    ]
    for (first, a), (second, b) in combinations(enumerate(views), 2):
        try:
            # Any bound is taken; the stubs know of two.
            share = np.shares_memory(a, b, max_work=_MOST_WORK)  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            continue  # refused is only what is known
        if share:
            raise ValueError(
                f"fields {first} and {second} share memory: the ghosts of both would be written. "
                "Name each array once."
            )


def _addresses(fields: Sequence[Any], layouts: Sequence[Layout]) -> Sequence[int]:
    if layouts[0].device is None:
        arrays = [as_numpy(field, "a field") for field in fields]
        return [array.__array_interface__["data"][0] for array in arrays]
    from mpishare.halo.cudafields import addresses

    return addresses(fields, layouts)


class _View:
    """Where a field stands, as NumPy sees an array; in GPU memory nothing of it may be read."""

    def __init__(self, address: int, layout: Layout) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": layout.shape,
            "strides": layout.strides,
            "typestr": f"|V{layout.dtype.itemsize}",
        }

    def array(self) -> np.ndarray[Any, Any]:
        """Return it, to be asked for its place alone."""
        return np.asarray(self)

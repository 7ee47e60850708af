"""What one rank owns in a halo case: the block, the fields on it and the ghosts around."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt, prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpishare.bench.options import Options

ITEM_NBYTES = 8
#: Owned cells of a thin block, in widths: as few as leave an interior, since a row of them is a
#: whole face.
_ROWS = 4
#: Sets of fields: in windows and private. Faces beside them, a side: the check's and the rivals'.
_SETS, _FACES = 2, 20


@dataclass(frozen=True)
class Block:
    """The block of every rank, the same on all.

    Attributes
    ----------
    n : int
        Owned cells along each axis that is cut.
    uncut : tuple of int
        The extents of the axes after them.
    naxes, width, count : int
        Axes that are cut, ghosts a side, fields.
    corners : bool
        Whether edges and corners have ghosts that are exchanged.
    """

    n: int
    uncut: tuple[int, ...]
    naxes: int
    width: int = 1
    count: int = 1
    corners: bool = False

    @classmethod
    def of(cls, options: Options, naxes: int, nbytes: int) -> Block:
        """Return the block of which a face of one field comes as near to `nbytes` as may be.

        Local. With one axis that is cut it is thin: a face has any size that is asked for.
        """
        width = options.width
        area = max(nbytes // (ITEM_NBYTES * width), 1)
        n = {1: _ROWS * width, 2: max(area, width), 3: max(_side(area), width)}[naxes]
        uncut = (area,) if naxes == 1 else ()
        return cls(n, uncut, naxes, width, options.fields, options.corners)

    @classmethod
    def cube(cls, options: Options, nbytes: int) -> Block:
        """Return the same of a cube of which one axis is cut. Local."""
        n = max(_side(max(nbytes // (ITEM_NBYTES * options.width), 1)), options.width)
        return cls(n, (n, n), 1, options.width, options.fields)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a field, ghosts counted."""
        return (self.n + 2 * self.width,) * self.naxes + self.uncut

    @property
    def face_nbytes(self) -> int:
        """One face of one field."""
        return ITEM_NBYTES * self.width * int(self.n ** (self.naxes - 1)) * prod(self.uncut)

    @property
    def needed_nbytes(self) -> int:
        """What a rank takes for all arms of a case."""
        face = int((self.n + 2 * self.width) ** (self.naxes - 1)) * prod(self.uncut) * self.width
        cells = _SETS * prod(self.shape) + _FACES * 2 * self.naxes * face
        return ITEM_NBYTES * self.count * cells


def _side(area: int) -> int:
    """Return the side of the nearest square."""
    side = isqrt(area)
    # (s + 1/2)^2 is no whole number, so that s^2 + s is on the near side.
    return side + (area > side * (side + 1))

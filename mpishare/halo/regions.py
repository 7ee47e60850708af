"""The index of a rank's own cells, of its interior and of its shell in the arrays of its fields."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from mpishare.halo import geometry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.halo.geometry import Block, BlockTransfers
    from mpishare.memory.types import Index
    from mpishare.plans.cells import Box


class Regions:
    """The cells of one field of a `HaloExchange`, or of several that the grid cuts alike.

    `name` is that of the plan, in errors.
    """

    def __init__(
        self,
        name: str,
        cells: BlockTransfers,
        axes: Sequence[tuple[int, ...]],
        shapes: Sequence[tuple[int, ...]],
    ) -> None:
        self.block: Block = cells.block
        self._name, self._cells, self._axes, self._shapes = name, cells, axes, shapes

    @cached_property
    def owned(self) -> Index:
        """See `HaloExchange.owned`."""
        return self._index(self.block.owned)

    @cached_property
    def interior(self) -> Index:
        """See `HaloExchange.interior`."""
        return self._index(self._interior)

    @cached_property
    def shell(self) -> tuple[Index, ...]:
        """See `HaloExchange.shell`."""
        return tuple(map(self._index, self.block.owned.outside(self._interior)))

    def shifted(self, box: Index, axis: int, n: int) -> Index:
        """See `HaloExchange.shifted`."""
        try:
            return geometry.shifted(box, axis, n, self._shapes)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self._name}: shifted failed: {error}") from None

    @cached_property
    def _interior(self) -> Box:
        return geometry.interior(*self._cells)

    def _index(self, box: Box) -> Index:
        """Return the index of a box of the grid's axes that fits every field."""
        axes, ndims = self._axes, [len(shape) for shape in self._shapes]
        cuts = dict(zip(axes[0], box.slices, strict=True))
        items = [cuts.get(axis, slice(None)) for axis in range(ndims[0])]
        if len(set(axes)) == 1:
            return tuple(items[: max(axes[0]) + 1])
        if len({tuple(a - n for a in each) for each, n in zip(axes, ndims, strict=True)}) == 1:
            # Counted from the last, they fit fields with any number of axes before them.
            return (Ellipsis, *items[min(axes[0]) :])
        raise ValueError(
            f"{self._name}: no index fits fields with {sorted(set(ndims))} axes: name axes= all "
            "from the first or all from the last"
        )

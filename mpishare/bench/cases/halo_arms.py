"""The arms of the halo cases: `HaloExchange` on fields in windows and on private ones."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import mpishare
from mpishare.bench.arm import Arm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.bench.cases.halo_grid import Grid


class HaloArm(Arm):
    """An arm that exchanges the ghosts of `fields`."""

    def __init__(self, grid: Grid, fields: Sequence[Any]) -> None:
        self.grid = grid
        self.fields = tuple(fields)
        # Ghosts that no exchange may write are compared too, from the first step on.
        self.poison()

    def fill(self, token: int) -> None:
        """Write the cells that the neighbors get."""
        self.grid.check.fill(self.fields, token)

    def poison(self) -> None:
        """Spoil all ghosts."""
        self.grid.check.poison(self.fields)

    def count(self, token: int) -> None:
        """Compare the ghosts with what their owners filled."""
        self.grid.check.count(self.fields, token)

    def wrong(self) -> int:
        """Return how many words were wrong."""
        return self.grid.check.wrong()


class PrivateFields(HaloArm):
    """`HaloExchange` on the private fields."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid, grid.fields)
        self.plan()

    def plan(self) -> None:
        """Make the exchange. Collective."""
        grid = self.grid
        self._halo = mpishare.HaloExchange(
            grid.cart,
            self.fields,
            grid.width,
            corners=grid.corners,
            axes=grid.axes,
            node=grid.session.node,
        )
        self._exchange = self._halo.exchange

    def step(self) -> None:
        """Exchange the ghosts."""
        self._exchange(*self.fields)

    @property
    def call(self) -> Callable[[], object]:
        """`HaloExchange.exchange` on the fields."""
        return partial(self._exchange, *self.fields)

    def close(self) -> None:
        """Close the exchange."""
        self._halo.close()
        # Windows want no view of them left, and the exchange may hold some.
        del self._halo, self._exchange, self.fields


class WindowFields(PrivateFields):
    """The same on fields that neighbors may write into.

    Attributes
    ----------
    order : tuple of int
        Which axis in memory each axis of a field is; empty where they are in order.
    """

    order: tuple[int, ...] = ()

    def __init__(self, grid: Grid) -> None:
        node = grid.session.node
        axes = self.order or tuple(range(len(grid.shape)))
        shape = [0] * len(axes)
        for axis, extent in zip(axes, grid.shape, strict=True):
            shape[axis] = extent
        windows = [node.allocate_each(shape, float, fill=0) for _ in range(grid.count)]
        HaloArm.__init__(self, grid, [window.array.transpose(axes) for window in windows])
        self._windows = windows
        self.plan()

    def close(self) -> None:
        """Close the exchange and the windows."""
        super().close()
        for window in reversed(self._windows):
            window.close()

"""The rivals of the halo cases that leave packing to MPI: derived datatypes. Host only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpishare.bench.cases.halo_arms import HaloArm
from mpishare.bench.cases.halo_messages import Neighborhood

if TYPE_CHECKING:
    from mpishare.bench.cases.halo_grid import Grid, Slices


class _Typed(HaloArm):
    """A datatype for what leaves through each side and one for what comes in.

    With one field they count from its first byte, with several from address 0.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid, grid.fields)
        self.buffer: Any = self.fields[0] if grid.count == 1 else MPI.BOTTOM
        self.out = [self._type(side.source) for side in grid.sides]
        self.into = [self._type(side.target) for side in grid.sides]

    def close(self) -> None:
        """Free the datatypes."""
        for datatype in (*self.out, *self.into):
            datatype.Free()

    def _type(self, cells: Slices) -> MPI.Datatype:
        shape = self.grid.shape
        spans = [range(*span.indices(extent)) for span, extent in zip(cells, shape, strict=True)]
        extents, starts = [len(span) for span in spans], [span.start for span in spans]
        box = MPI.DOUBLE.Create_subarray(shape, extents, starts)
        if self.grid.count == 1:
            return box.Commit()
        places = [MPI.Get_address(field) for field in self.fields]
        every = MPI.Datatype.Create_struct([1] * len(places), places, [box] * len(places))
        box.Free()
        return every.Commit()


class Datatypes(_Typed):
    """Requests that are made once, Startall and Waitall."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        cart, buffer = grid.cart, self.buffer
        self._requests: list[MPI.Prequest] = [
            cart.Recv_init([buffer, 1, datatype], side.opposite, side.number)
            for datatype, side in zip(self.into, grid.sides, strict=True)
        ]
        self._requests += [
            cart.Send_init([buffer, 1, datatype], side.neighbor, side.number)
            for datatype, side in zip(self.out, grid.sides, strict=True)
        ]

    def step(self) -> None:
        """Exchange the ghosts."""
        MPI.Prequest.Startall(self._requests)
        MPI.Request.Waitall(self._requests)

    def close(self) -> None:
        """Free the requests and the datatypes."""
        for request in self._requests:
            request.Free()
        super().close()


class NeighborTypes(_Typed):
    """Neighbor_alltoallw."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        ones, zeros = [1] * len(grid.sides), [0] * len(grid.sides)
        sent = [self.buffer, ones, zeros, self.out]
        received = [self.buffer, ones, zeros, self.into]
        self._links = Neighborhood(grid, "Neighbor_alltoallw", sent, received)

    def step(self) -> None:
        """Exchange the ghosts."""
        self._links.run()

    def close(self) -> None:
        """Free what MPI has of it, and the datatypes."""
        self._links.close()
        super().close()

"""The halo exchange of a Cartesian grid: geometry on top of the plan."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

from mpishare.halo import geometry
from mpishare.halo.geometry import Block, Grid, fields_of_block, normalize_block_axes
from mpishare.halo.plan import Plan
from mpishare.memory.arguments import require_bool
from mpishare.plans.message import Message, Part, parts_of_fields
from mpishare.plans.setup import Description, agree_on_fields, plan_setup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi4py import MPI

    from mpishare.halo.geometry import Transfer
    from mpishare.memory.types import Fields, Index, RouteName, Width
    from mpishare.node import Node
    from mpishare.plans.cells import Box
    from mpishare.plans.engine import PlanSetup
    from mpishare.plans.fields import GivenFields
    from mpishare.plans.layout import FieldLayout
    from mpishare.plans.setup import AgreedFields


_CALL = "HaloExchange"


class HaloExchange(Plan):
    """The exchange of ghost cells between the blocks of a Cartesian grid.

    Collective over `cart`, host-blocking: some milliseconds on the host, more on CUDA, where memory
    of other GPUs is mapped. Make it once, use it at every step.

    Parameters
    ----------
    cart : mpi4py.MPI.Cartcomm, or mpi4py.MPI.Intracomm with `dims`
        The grid of ranks, over any number of nodes, with 1 to 4 axes. Axes with `periods` wrap.
    fields : array or Layout, or list or tuple of them
        NumPy arrays, or CuPy arrays and PyTorch tensors on this rank's GPU, ghosts counted; a
        `Layout` stands for one that does not exist yet. All own the same cells along the axes that
        the grid cuts; dtypes and other axes may differ. One `Layout` without dtype is for any
        fields on these cells.
    width : int, or one int or (low, high) pair for each axis of the grid
        This rank's ghosts, in cells; may differ from rank to rank. A rank sends as many cells as
        its neighbor's width. With one axis, ``(1, 0)`` is its pair.
    corners : bool
        Whether ghosts at edges and corners are exchanged too; the same on all ranks.
    axes : int or tuple of int, optional
        Which axes of the fields the grid cuts, where they have more: ``(-2, -1)``. The others
        travel whole.
    node : Node, optional
        A node with all ranks of `cart` that are on this machine. Default: one that is kept
        for these ranks while they have plans on it.
    require : str or sequence of str, optional
        The routes that are allowed: ``("fused", "copy")``. Default: all.
    dims : sequence of int, optional
        On a communicator that is not Cartesian: how many ranks there are along each axis. Rank r
        is at ``numpy.unravel_index(r, dims)``, as in a cart that is made with ``reorder=False``.
        As in `MPI.Compute_dims`, MPI chooses the extents that are 0; `grid` has its choice.
    periods : bool, or one bool for each axis, optional
        With `dims`: which axes wrap. Default: none.

    Attributes
    ----------
    grid : Grid
        The grid of ranks.
    block : Block
        This rank's owned cells (`extents`) and ghosts (`widths`) along each axis of the grid, and
        where its first owned cell is in the whole (`start`).

    Raises
    ------
    TypeError, ValueError
        On all ranks, if a halo is wider than the neighbor's block or faces do not match; if `dims`
        do not fit the communicator, or come with a cart; if an argument is wrong.
    PeerError
        If another rank's arguments are wrong; `MismatchError` if they differ where they must not.
    UnsupportedError
        If `require` refuses a route.
    ClosedError
        If the node is closed.

    Examples
    --------
    A periodic row of ranks, each with 8 cells and a ghost on either side:

    >>> from mpi4py import MPI
    >>> comm = MPI.COMM_WORLD
    >>> u = numpy.full(10, float(comm.rank))
    >>> with HaloExchange(comm, u, 1, dims=(comm.size,), periods=True) as halo:
    ...     halo.exchange()
    >>> bool(u[0] == (comm.rank - 1) % comm.size)
    True
    """

    def __init__(
        self,
        cart: MPI.Intracomm,
        fields: Fields,
        width: Width,
        *,
        corners: bool = False,
        axes: SupportsIndex | Sequence[SupportsIndex] | None = None,
        node: Node | None = None,
        require: RouteName | Sequence[RouteName] | None = None,
        dims: Sequence[SupportsIndex] | None = None,
        periods: bool | Sequence[bool | int] | None = None,
    ) -> None:
        cells = _GridCells(cart, dims, periods, width, axes, corners)
        with plan_setup(_CALL, cart, node, "cart must be a Cartcomm") as start:
            agreed = agree_on_fields(start, fields, require, cells.describe)
            cells.find(agreed)
            self.grid: Grid = cells.grid
            self.block: Block = cells.block
            self._transfers = cells.transfers
            self._axes = [tuple(each) for each in agreed.setup.same["axes"]]
            self._shapes = [each.shape for each in agreed.setup.mine]
            if agreed.setup.takes_any:
                self._axes, self._shapes = fields_of_block(self.block.shape, axes)
            super().__init__(agreed, cells)

    @cached_property
    def owned(self) -> Index:
        """Slices of the cells that this rank owns. Local."""
        return self._index(self.block.owned)

    @cached_property
    def interior(self) -> Index:
        """Slices of the owned cells that no neighbor reads and that need no neighbor. Local.

        Between `start` and `wait` they may be written, and computed with the halo's width: they are
        farther from ghosts that are exchanged than these are wide. Cells at a wall are among them:
        fill the ghosts beyond the wall before these cells are computed.
        """
        return self._index(self._interior())

    @cached_property
    def shell(self) -> tuple[Index, ...]:
        """Slices of disjoint boxes: the owned cells outside `interior`. Local."""
        return tuple(map(self._index, geometry.shell(self.block, self._interior())))

    def shifted(self, box: Index, axis: int, n: int) -> Index:
        """Return a box of the fields that is moved by `n` cells along `axis`. Local.

        Spares a stencil the arithmetic with slices.

        Parameters
        ----------
        box : tuple of slice
            `owned`, `interior`, one of `shell`, or any other index of slices.
        axis : int
            Of the fields, not of the grid; counted from the last if negative.
        n : int
            How many cells; negative towards the first.

        Raises
        ------
        ValueError
            If a cell of the moved box is outside the fields.

        Examples
        --------
        >>> from mpi4py import MPI
        >>> u = numpy.arange(6.0)
        >>> halo = HaloExchange(MPI.COMM_SELF, u, 1, dims=(1,))
        >>> halo.owned, halo.shifted(halo.owned, 0, -1)
        ((slice(1, 5, None),), (slice(0, 4, None),))
        >>> u[halo.shifted(halo.owned, 0, 1)] - u[halo.shifted(halo.owned, 0, -1)]
        array([2., 2., 2., 2.])
        >>> halo.close()
        """
        try:
            return geometry.shifted(box, axis, n, self._shapes)
        except (TypeError, ValueError) as error:
            raise self._named("shifted", error) from None

    def _interior(self) -> Box:
        return geometry.interior(self.block, *self._transfers)

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
            f"{self.name}: no index fits fields with {sorted(set(ndims))} axes: name axes= all "
            "from the first or all from the last"
        )


def _grid_of(comm: MPI.Intracomm, dims: Any, periods: Any) -> Grid:
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
    found = geometry.normalize_dims(dims, comm.size)
    if 0 in found:
        found = tuple(MPI.Compute_dims(comm.size, found))
    return Grid(found, geometry.normalize_periods(periods, len(found)))


class _GridCells:
    """The cells of fields that a grid cuts, as `Plan` takes them.

    The grid and this rank's block are found with the first fields; later ones must fit them.
    """

    grid: Grid
    block: Block
    transfers: tuple[tuple[Transfer, ...], tuple[Transfer, ...]]

    def __init__(
        self, comm: MPI.Intracomm, dims: Any, periods: Any, width: Any, axes: Any, corners: Any
    ) -> None:
        self._find_grid = partial(_grid_of, comm, dims, periods)
        self._width, self._axes, self._corners = width, axes, corners
        self._expected: Block | None = None

    def describe(self, found: GivenFields) -> Description:
        """Return the arguments that all ranks give alike, and this rank's block."""
        if self._expected is None:
            self.grid = self._find_grid()
        same: dict[str, Any] = {"corners": require_bool("", "corners", self._corners)}
        cuts = self._cut(found)
        same |= {
            "dims": self.grid.dims,
            "periods": self.grid.periods,
            "axes": [cut.axes for cut in cuts],
            "other axes": [cut.other_extents for cut in cuts],
        }
        return Description(same, [cuts[0].block.extents, cuts[0].block.widths])

    def _cut(self, found: GivenFields) -> list[_Cut]:
        axes, naxes = self._axes, len(self.grid.dims)
        shapes = [field.shape for field in found.layouts]
        if not 1 <= naxes <= 4:
            raise ValueError(f"cart has {naxes} axes: 1 to 4 are allowed")
        if found.takes_any:
            axes = normalize_block_axes(axes, naxes, shapes[0])
        elif self._expected is not None and axes is None:
            axes = tuple(range(naxes))
        widths = geometry.normalize_widths(self._width, naxes)
        cut_of = {shape: _Cut.of(shape, widths, axes) for shape in dict.fromkeys(shapes)}
        cuts = [cut_of[shape] for shape in shapes]
        _require_block(cuts, shapes[0], self._expected)
        return cuts

    def find(self, agreed: AgreedFields) -> None:
        """Find the block of this rank and its transfers, or raise on all ranks."""
        blocks = [
            Block(tuple(extents), tuple(map(tuple, widths))) for extents, widths in agreed.geometry
        ]
        grid, corners, rank = self.grid.of_blocks(blocks), self._corners, agreed.setup.comm.rank
        geometry.check(grid, blocks, corners=corners)
        self._expected = blocks[rank]
        self.block = blocks[rank]._replace(start=geometry.start_of(grid, rank, blocks))
        self.transfers = geometry.transfers(grid, rank, blocks, corners=corners)

    def messages(self, setup: PlanSetup) -> tuple[list[Message], list[Message]]:
        axes_of = dict(zip(setup.mine, setup.same["axes"], strict=True))
        # Over all directions, so that a tag does not depend on `corners`.
        tags = {each: tag for tag, each in enumerate(self.grid.directions(corners=True))}

        def message(transfer: Transfer, peer: int, box: Box) -> Message:
            def part(layout: FieldLayout) -> Part:
                return Part.of_box(0, layout, box.along(axes_of[layout], layout.shape))

            return Message.of(peer, tags[transfer.direction], parts_of_fields(setup.mine, part))

        sends, recvs = self.transfers
        return (
            [message(each, each.receiver, each.source) for each in sends],
            [message(each, each.sender, each.target) for each in recvs],
        )


def _require_block(cuts: Sequence[_Cut], shape: Sequence[int], expected: Block | None) -> None:
    """Raise `ValueError` unless fields are of one block; `shape` is that of the first."""
    first = cuts[0]
    for number, cut in enumerate(cuts):
        if cut.block != first.block:
            raise ValueError(
                f"field {number} owns {cut.block.extents} cells along the axes of the grid, "
                f"field 0 {first.block.extents}: a plan is for fields on the same cells"
            )
    if expected is not None and first.block != expected:
        raise ValueError(
            f"field 0 of shape {shape} has {first.block.shape} cells along its axes "
            f"{first.axes}, which the grid cuts (axes=); the plan was made for a block of "
            f"{expected.shape}"
        )


class _Cut(NamedTuple):
    """How a grid cuts fields of one shape."""

    axes: tuple[int, ...]
    other_extents: list[int]  # along the axes that are not cut
    block: Block

    @classmethod
    def of(cls, shape: tuple[int, ...], widths: geometry.Widths, given: Any) -> _Cut:
        axes = geometry.normalize_axes(given, len(widths), len(shape))
        others = [extent for axis, extent in enumerate(shape) if axis not in axes]
        return cls(axes, others, Block.of(shape, widths, axes))

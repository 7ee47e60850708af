"""The halo exchange of a Cartesian grid: geometry on top of the plan."""

from __future__ import annotations

from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, SupportsIndex

from mpishare.halo import geometry
from mpishare.halo.geometry import (
    Block,
    BlockTransfers,
    Grid,
    fields_of_block,
    normalize_block_axes,
)
from mpishare.halo.plan import Plan
from mpishare.halo.regions import Regions
from mpishare.memory.arguments import is_int, require_bool
from mpishare.plans.message import Part, gather_messages
from mpishare.plans.setup import Description, agree_on_fields, plan_setup
from mpishare.plans.wire import require_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpi4py import MPI

    from mpishare.halo.geometry import Direction
    from mpishare.memory.types import BackendName, Fields, Index, RouteName, Widths, WireName
    from mpishare.node import Node
    from mpishare.plans.cells import Box
    from mpishare.plans.engine import PlanSetup
    from mpishare.plans.fields import GivenFields
    from mpishare.plans.layout import FieldLayout
    from mpishare.plans.message import Message
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
        `Layout` stands for one that does not exist yet. With one width all own the same cells along
        the axes that the grid cuts; dtypes and other axes may differ. One `Layout` without dtype is
        for any fields on these cells.
    width : int, or one int or (low, high) pair for each axis of the grid; or one of these a field
        This rank's ghosts, in cells; may differ from rank to rank. A rank sends as many cells as
        its neighbor's width. Ghosts of a neighbor without cells along an axis are those of the next
        rank that has some. With one axis, ``(1, 0)`` is its pair. A list that can be the width of
        all fields is; any other has an entry for each field, which may then own cells of its own.
        Entries with a pair for each axis, ``[((1, 1), (1, 1)), ((1, 2), (1, 1))]``, have no other
        meaning.
    corners : bool
        Whether ghosts at edges and corners are exchanged too; the same on all ranks.
    axes : int or tuple of int, optional
        Which axes of the fields the grid cuts, where they have more: ``(-2, -1)``. The others
        travel whole.
    node : Node, optional
        A node with all ranks of `cart` that are on this machine. Default: one that is kept
        for these ranks while they have plans on it.
    backend : {"auto", "cuda", "host"}
        The memory of the fields: of GPUs or of the host. Default: that of the first array; for a
        `Layout` that of the node. Without `node` it decides which node is kept.
    require : str or sequence of str, optional
        The routes that are allowed: ``("fused", "copy")``. Default: all.
    wire : {"float32", "float16", "bfloat16"}, optional
        The type in which cells of a wider one travel, real or complex; the same on all ranks. Each
        is rounded once, to nearest, ties to even; its ghosts have the field's dtype, and differ by
        half a unit in the last place of the wire at most: 2**-24, 2**-11 or 2**-8 of the number,
        where that is normal in it. Owned cells are untouched; what is too large becomes infinite.
        `accumulate` rounds each ghost so, and adds in the field's dtype. Default: nothing is
        rounded.
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
        where they are in the whole: the first (`start`), and all of them as a `Box` (`box`), which
        `Redistribute` takes. That of field 0, where `of` has one of each field.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if a halo is wider than the neighbor's block or faces do not match; if `dims`
        do not fit the communicator, or come with a cart; if an argument is wrong.
        `NeighborExchange.from_global_ids` takes such blocks.
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
    ...     halo.exchange(u)
    >>> bool(u[0] == (comm.rank - 1) % comm.size)
    True
    """

    def __init__(
        self,
        cart: MPI.Intracomm,
        fields: Fields,
        width: Widths,
        *,
        corners: bool = False,
        axes: SupportsIndex | Sequence[SupportsIndex] | None = None,
        node: Node | None = None,
        backend: Literal["auto"] | BackendName = "auto",
        require: RouteName | Sequence[RouteName] | None = None,
        wire: WireName | None = None,
        dims: Sequence[SupportsIndex] | None = None,
        periods: bool | Sequence[bool | int] | None = None,
    ) -> None:
        cells = _GridCells(partial(_grid_of, cart, dims, periods), width, axes, corners, wire)
        with plan_setup(_CALL, cart, node, "cart must be a Cartcomm", backend=backend) as start:
            agreed = agree_on_fields(start, fields, require, cells.describe)
            cells.find(agreed)
            self.grid: Grid = cells.grid
            transfers = cells.of_fields(len(agreed.setup.mine))
            self.block: Block = transfers[0].block
            self._is_staggered = cells.are_staggered
            cut = [tuple(each) for each in agreed.setup.same["axes"]]
            shapes = [each.shape for each in agreed.setup.mine]
            if agreed.setup.takes_any:
                cut, shapes = fields_of_block(self.block.shape, axes)
            super().__init__(agreed, cells)
            self._regions_of_all = Regions(self.name, transfers[0], cut, shapes)
            self._regions = [
                Regions(self.name, each, cut[field:][:1], shapes[field:][:1])
                for field, each in enumerate(transfers)
            ]

    @cached_property
    def owned(self) -> Index:
        """Slices of the cells that this rank owns, in all fields. Local.

        `owned`, `interior`, `shell` and `shifted` raise `ValueError` where fields have ghosts of
        their own: `of` has those of each field.
        """
        return self._common("owned").owned

    @cached_property
    def interior(self) -> Index:
        """Slices of the owned cells that no neighbor reads and that need no neighbor. Local.

        Between `start` and `wait` they may be written, and computed with the halo's width: they are
        farther from ghosts that are exchanged than these are wide. Cells at a wall are among them:
        fill the ghosts beyond the wall before these cells are computed.
        """
        return self._common("interior").interior

    @cached_property
    def shell(self) -> tuple[Index, ...]:
        """Slices of disjoint boxes: the owned cells outside `interior`. Local."""
        return self._common("shell").shell

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
        return self._common("shifted").shifted(box, axis, n)

    def of(self, field: int) -> Regions:
        """Return the cells of one field, where fields have ghosts of their own. Local.

        Parameters
        ----------
        field : int
            Its place among the fields of the plan.

        Returns
        -------
        Regions
            With `block`, `owned`, `interior`, `shell` and `shifted` as the plan has them.

        Raises
        ------
        ValueError
            If the plan has no such field.

        Examples
        --------
        Pressures in three cells, and velocities at their four faces; the last face is the first
        one of the next rank:

        >>> from mpi4py import MPI
        >>> comm = MPI.COMM_SELF
        >>> p, u = numpy.zeros(5), numpy.zeros(6)
        >>> halo = HaloExchange(comm, (p, u), [(1, 1), (1, 2)], dims=(1,), periods=True)
        >>> halo.of(0).block.shape, halo.of(1).block.shape, halo.of(1).owned
        ((5,), (6,), (slice(1, 4, None),))
        >>> halo.close()
        """
        if not is_int(field) or not 0 <= field < len(self._regions):
            raise ValueError(
                f"{self.name}: of failed: the fields of the plan are 0 to "
                f"{len(self._regions) - 1}, not {field!r}"
            )
        return self._regions[field]

    def _common(self, name: str) -> Regions:
        if self._is_staggered:
            raise ValueError(
                f"{self.name}: {name} failed: the fields have ghosts of their own. "
                f"halo.of(0).{name} has it of field 0"
            )
        return self._regions_of_all

    def _describe(self) -> str:
        owned: Any = self.block.extents
        ghosts: Any = self.block.widths
        if self._is_staggered:
            owned = tuple(each.block.extents for each in self._regions)
            ghosts = tuple(each.block.widths for each in self._regions)
        return (
            f"owned={owned}, ghosts={ghosts}, periodic={self.grid.periods}, {super()._describe()}"
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
    _cells: list[BlockTransfers]  # of each field, or one of all

    def __init__(
        self, find_grid: Callable[[], Grid], width: Any, axes: Any, corners: Any, wire: Any
    ) -> None:
        self._find_grid = find_grid
        self._width, self._axes, self._corners, self._wire = width, axes, corners, wire
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
            "wire": require_wire(self._wire, found),
        }
        blocks = [cut.block for cut in cuts]
        return Description(same, blocks if len({*blocks}) > 1 else blocks[:1])

    def _cut(self, found: GivenFields) -> list[_Cut]:
        axes, naxes = self._axes, len(self.grid.dims)
        shapes = [field.shape for field in found.layouts]
        if not 1 <= naxes <= 4:
            raise ValueError(f"cart has {naxes} axes: 1 to 4 are allowed")
        if found.takes_any:
            axes = normalize_block_axes(axes, naxes, shapes[0])
        elif self._expected is not None and axes is None:
            axes = tuple(range(naxes))
        if self._expected is not None:
            widths = [self._expected.widths]
        else:
            widths = geometry.normalize_widths(self._width, naxes, len(shapes))
        cut_of = cache(partial(_Cut.of, axes))
        each = widths * len(shapes) if len(widths) == 1 else widths
        cuts = [cut_of(*given) for given in zip(shapes, each, strict=True)]
        if len(widths) == 1:
            _require_block(cuts, shapes[0], self._expected)
        return cuts

    def find(self, agreed: AgreedFields) -> None:
        """Find this rank's blocks and their transfers, or raise on all ranks."""
        # Ranks whose fields have one block sent it once.
        count = max(map(len, agreed.geometry))
        by_field = zip(*(_blocks(packed, count) for packed in agreed.geometry), strict=True)
        rank, found = agreed.setup.comm.rank, {}
        self.are_staggered, self._cells = count > 1, []
        for field, blocks in enumerate(by_field):
            if blocks not in found:
                name = f"field {field}: " if self.are_staggered else ""
                found[blocks] = self._transfers(name, rank, blocks)
            self._cells.append(found[blocks])
        self._expected = self._cells[0].block._replace(start=())

    def _transfers(self, name: str, rank: int, blocks: Sequence[Block]) -> BlockTransfers:
        """Return the transfers of a field whose blocks these are, by rank."""
        grid, corners = self.grid.of_blocks(blocks), self._corners
        try:
            geometry.check(grid, blocks, corners=corners)
        except ValueError as error:
            raise ValueError(f"{name}{error}") from None
        block = blocks[rank]._replace(start=geometry.start_of(grid, rank, blocks))
        return BlockTransfers(block, *geometry.transfers(grid, rank, blocks, corners=corners))

    def of_fields(self, count: int) -> list[BlockTransfers]:
        return self._cells if self.are_staggered else self._cells * count

    def messages(self, setup: PlanSetup) -> tuple[list[Message], list[Message]]:
        """Return a message with cells of all fields for each direction and rank there."""
        fields = self.of_fields(len(setup.mine))
        sent = [[(e.direction, e.receiver, e.source) for e in each.sent] for each in fields]
        received = [[(e.direction, e.sender, e.target) for e in each.received] for each in fields]
        return self._messages(setup, sent), self._messages(setup, received)

    def _messages(
        self, setup: PlanSetup, transfers: Sequence[Sequence[tuple[Direction, int, Box]]]
    ) -> list[Message]:
        """Return the messages of each field's transfers: each with its peer, and its box here."""
        # Over all directions, so that a tag does not depend on `corners`.
        tags = {each: tag for tag, each in enumerate(self.grid.directions(corners=True))}
        axes = dict(zip(setup.mine, setup.same["axes"], strict=True))

        @cache
        def part(layout: FieldLayout, box: Box) -> Part:
            return Part.of_box(0, layout, box.along(axes[layout], layout.shape))

        return gather_messages(
            (tags[direction], peer, part(setup.mine[field], box).of_field(field))
            for field, given in enumerate(transfers)
            for direction, peer, box in given
        )


def _blocks(packed: Sequence[Any], count: int) -> list[Block]:
    """Return a rank's blocks of `count` fields; it packed one block if all are alike."""
    found = [Block(tuple(extents), tuple(map(tuple, widths))) for extents, widths, _ in packed]
    return found * count if len(found) == 1 else found


def _require_block(cuts: Sequence[_Cut], shape: Sequence[int], expected: Block | None) -> None:
    """Raise `ValueError` unless fields are of one block; `shape` is that of the first."""
    first = cuts[0]
    example = ((1, 2), *[1] * (len(first.axes) - 1)) if len(first.axes) > 1 else (1, 2)
    for number, cut in enumerate(cuts):
        if cut.block != first.block:
            raise ValueError(
                f"field {number} owns {cut.block.extents} cells along the axes of the grid, "
                f"field 0 {first.block.extents}: fields of one width are on the same cells. Give "
                f"staggered fields a width each: width=[1, {example}, ...]"
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
    def of(cls, given: Any, shape: tuple[int, ...], widths: geometry.Widths) -> _Cut:
        axes = geometry.normalize_axes(given, len(widths), len(shape))
        others = [extent for axis, extent in enumerate(shape) if axis not in axes]
        return cls(axes, others, Block.of(shape, widths, axes))

"""The halo exchange of a Cartesian grid: a thin geometry on the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.halo import geometry
from mpishare.halo.geometry import Block, Box, Grid
from mpishare.halo.message import Message, Part
from mpishare.halo.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi4py import MPI

    from mpishare.halo.engine import PlanSetup
    from mpishare.halo.geometry import Transfer
    from mpishare.halo.layout import Layout
    from mpishare.node import Node

    Index = tuple[Any, ...]


class HaloExchange(Plan):
    """The exchange of ghost cells between the blocks of a Cartesian grid.

    Collective over `cart`, host-blocking: some milliseconds on the host, more on CUDA, where memory
    of other GPUs is mapped. Make it once, use it at every step.

    Parameters
    ----------
    cart : mpi4py.MPI.Cartcomm
        The grid of ranks, over any number of nodes, with 1 to 4 axes. Axes with `periods` wrap.
    fields : array, or list or tuple of arrays
        NumPy arrays, or CuPy arrays and PyTorch tensors on this rank's GPU, ghosts counted. All own
        the same cells along the axes that the grid cuts; dtypes and other axes may differ.
    width : int, or one int or (low, high) pair for each axis of the grid
        This rank's ghosts, in cells; may differ from rank to rank. I send what my neighbor's width
        asks for. With one axis, ``(1, 0)`` is its pair.
    corners : bool
        Whether ghosts at edges and corners are exchanged too; the same on all ranks.
    axes : int or tuple of int, optional
        Which axes of the fields the grid cuts, where they have more: ``(-2, -1)``. The others
        travel whole.
    node : Node, optional
        Of which the ranks of `cart` on this node are a part. Default: one that is kept on `cart`
        while there are plans on it.
    require : str or sequence of str, optional
        The routes that are allowed: ``("fused", "copy")``. Default: all.

    Attributes
    ----------
    grid : Grid
        The grid of ranks.
    block : Block
        What this rank owns, and its ghosts.

    Raises
    ------
    ValueError
        On all ranks, if a halo is wider than the neighbor's block or faces do not match.
    PeerError
        If another rank's arguments are wrong; `MismatchError` if they differ where they must not.
    UnsupportedError
        If `require` refuses a route.
    """

    _call = "HaloExchange"

    def __init__(
        self,
        cart: MPI.Cartcomm,
        fields: Any,
        width: Any,
        *,
        corners: bool = False,
        axes: Any = None,
        node: Node | None = None,
        require: Any = None,
    ) -> None:
        from mpi4py import MPI

        if not isinstance(cart, MPI.Cartcomm) or cart == MPI.COMM_NULL:
            is_none = cart == MPI.COMM_NULL
            kind = type(cart).__name__
            told = "COMM_NULL: this rank is none of the grid" if is_none else f"of type {kind}"
            raise TypeError(f"HaloExchange failed: cart must be a Cartcomm, not {told}")
        dims, periods, _ = cart.Get_topo()
        self.grid = Grid(tuple(dims), tuple(map(bool, periods)))
        self.block = Block((), ())
        self._corners = bool(corners)
        self._axes: list[tuple[int, ...]] = []
        self._axes_given = axes
        super().__init__(cart, fields, node, require, {"width": width})

    @property
    def owned(self) -> Index:
        """Slices of the cells that this rank owns. Local."""
        return self._index(self.block.owned)

    @property
    def interior(self) -> Index:
        """Slices of the owned cells that no neighbor reads and that need no neighbor. Local.

        Between `start` and `wait` they may be written, and computed with the halo's width: they are
        farther from ghosts that are exchanged than these are wide.
        """
        return self._index(self._interior())

    @property
    def shell(self) -> tuple[Index, ...]:
        """Slices of disjoint boxes: the owned cells outside `interior`. Local."""
        return tuple(map(self._index, geometry.shell(self.block, self._interior())))

    def _describe(self, layouts: Sequence[Layout], arguments: dict[str, Any]) -> dict[str, Any]:
        naxes = len(self.grid.dims)
        if not 1 <= naxes <= 4:
            raise ValueError(f"cart has {naxes} axes: 1 to 4 are allowed")
        widths = geometry.normalize_widths(arguments["width"], naxes)
        blocks = []
        for field in layouts:
            axes = geometry.normalize_axes(self._axes_given, naxes, len(field.shape))
            self._axes.append(axes)
            blocks.append(Block.of(field.shape, widths, axes))
        for number, block in enumerate(blocks):
            if block != blocks[0]:
                raise ValueError(
                    f"field {number} owns {block.extents} cells along the axes of the grid, field "
                    f"0 {blocks[0].extents}: a plan is for fields on the same cells"
                )
        self.block = blocks[0]
        rest = [
            [extent for axis, extent in enumerate(field.shape) if axis not in axes]
            for field, axes in zip(layouts, self._axes, strict=True)
        ]
        return {
            "same": {"corners": self._corners, "axes": self._axes, "other axes": rest},
            "block": [self.block.extents, self.block.widths],
        }

    def _messages(self, setup: PlanSetup) -> tuple[list[Message], list[Message]]:
        blocks = [
            Block(tuple(extents), tuple((low, high) for low, high in widths))
            for extents, widths in (each["block"] for each in setup.described)
        ]
        geometry.check(self.grid, blocks, corners=self._corners)
        rank = setup.comm.rank
        sends, recvs = geometry.transfers(self.grid, rank, blocks, corners=self._corners)
        self._transfers = sends, recvs
        # Of all directions, so that the tag does not depend on what is exchanged.
        tags = {each: tag for tag, each in enumerate(self.grid.directions(corners=True))}

        def message(transfer: Transfer, peer: int, box: Box) -> Message:
            parts = [
                Part.of_box(field, each, box.along(axes, each.shape))
                for field, (each, axes) in enumerate(zip(setup.mine, self._axes, strict=True))
            ]
            return Message(peer, tags[transfer.direction], tuple(p for p in parts if p.nbytes))

        return (
            [message(each, each.receiver, each.source) for each in sends],
            [message(each, each.sender, each.target) for each in recvs],
        )

    def _interior(self) -> Box:
        return geometry.interior(self.block, *self._transfers)

    def _index(self, box: Box) -> Index:
        """Return what indexes a box of the grid's axes in every field."""
        axes, ndims = self._axes, [len(each.shape) for each in self._setup.mine]
        cuts = dict(zip(axes[0], box.slices(), strict=True))
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

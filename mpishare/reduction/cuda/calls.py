"""Calls with arrays of certain layouts: their launches, made once, and the graphs of these."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from mpishare.halo.cuda.graphs import GraphCache
from mpishare.reduction.cuda.fast_path import FastPath

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.coordination.agreement import Agreement
    from mpishare.halo.cuda.flags import PinnedFlags
    from mpishare.halo.cuda.launch_order import LaunchOrder
    from mpishare.halo.layout import FieldLayout
    from mpishare.ordering.stream_chain import StreamChain
    from mpishare.reduction.cuda.group import Enqueued, Pointers


class PreparedCall:
    """What a call enqueues for arrays of these layouts. Local.

    Parameters
    ----------
    layouts : sequence of FieldLayout
        Those of the arrays.
    enqueued : Enqueued
        What is put on the stream.
    pointers : Pointers
        Where that reads the addresses of the arrays.
    capturing : int
        A stream on which it may be captured; 0 where it is not to be replayed as a graph.
    where : str
        Names the plan and the rank in errors.

    Attributes
    ----------
    layouts : sequence of FieldLayout
        As given.
    try_fast : callable
        Given the arrays and the stream: replays their graph, or returns False with nothing done.
    """

    def __init__(
        self,
        layouts: Sequence[FieldLayout],
        enqueued: Enqueued,
        pointers: Pointers,
        capturing: int,
        where: str,
    ) -> None:
        self.layouts = layouts
        self.try_fast: Callable[..., bool] = _never
        self._enqueued, self._pointers = enqueued, pointers
        self._handles: dict[Any, int] = {}
        self._graphs: GraphCache | None = None
        if capturing:
            launcher: Any = SimpleNamespace(pointers=pointers.array, where=where)
            launch: Any = enqueued
            self._graphs = GraphCache(launcher, launch, capturing, self._handles)

    def fast_path(
        self, chain: StreamChain, order: LaunchOrder, agreement: Agreement, flags: PinnedFlags
    ) -> FastPath:
        """Return what replays its graphs. Local."""
        return FastPath(self.layouts, self._handles, chain, order, agreement, flags)

    def enqueue(self, stream: int, addresses: tuple[int, ...], *, is_captured: bool) -> None:
        """Enqueue it for arrays at these addresses."""
        if self._graphs is not None:
            self._graphs.enqueue(stream, addresses, is_captured=is_captured)
            return
        self._pointers.array[:] = [*addresses]
        self._enqueued.enqueue(stream)

    def close(self) -> None:
        """Destroy the graphs."""
        if self._graphs is not None:
            self._graphs.close()


def _never(*arguments: Any) -> bool:  # noqa: ARG001  as the replays of `FastPath`
    return False

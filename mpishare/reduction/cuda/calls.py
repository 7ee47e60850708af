"""Launches for arrays of certain layouts, made once, and their graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.plans.gpu.graphs import GraphCache
from mpishare.reduction.cuda.fast_path import FastPath

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.coordination.agreement import Agreement
    from mpishare.plans.gpu.flags import PinnedFlags
    from mpishare.plans.gpu.launch_order import LaunchOrder
    from mpishare.plans.layout import FieldLayout
    from mpishare.reduction.cuda.group import Enqueued, Pointers
    from mpishare.windows.stream_chain import StreamChain


class PreparedCall:
    """The work that a call enqueues for arrays of these layouts; no graphs if `capturing` is 0."""

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
            launch: Any = enqueued
            self._graphs = GraphCache(pointers.array, where, launch, capturing, self._handles)

    def fast_path(
        self, chain: StreamChain, order: LaunchOrder, agreement: Agreement, flags: PinnedFlags
    ) -> FastPath:
        """Return the function that replays its graphs."""
        return FastPath(self.layouts, self._handles, chain, order, agreement, flags)

    def enqueue(self, stream: int, addresses: tuple[int, ...], *, is_captured: bool) -> None:
        """Enqueue the call for arrays at these addresses."""
        if self._graphs is not None:
            self._graphs.enqueue(stream, addresses, is_captured=is_captured)
            return
        self._pointers.array[:] = [*addresses]
        self._enqueued.enqueue(stream)

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.close()


def _never(*arguments: Any) -> bool:  # noqa: ARG001  as the replays of `FastPath`
    return False

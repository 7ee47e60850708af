"""CUDA graphs of a launch, cached by the addresses of the fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.backends.cuda_graphs import Replay

if TYPE_CHECKING:
    from mpishare.backends.driver import Enqueued

_MAX_GRAPHS = 16
_MAX_SEEN = 1024
# Launches at the same addresses before these replace a graph of others. Making a graph takes as
# long as ten launches, and a program may cycle through more arrays than there are graphs.
_SIGHTS_TO_REPLACE = 256


def key_of(addresses: tuple[int, ...]) -> Any:
    """Return the key of the fields at these addresses: a bare int for one field."""
    return addresses if len(addresses) > 1 else addresses[0]


class GraphCache:
    """A launch, and graphs of it for fields that come again, while these are few.

    The launch reads the addresses of the fields from `pointers`; `where` names it in errors. Graphs
    are captured on the stream `capturing`, 0 for none, and published in `handles`.
    """

    def __init__(
        self, pointers: Any, where: str, launch: Enqueued, capturing: int, handles: dict[Any, int]
    ) -> None:
        self.pointers = pointers
        self._where = where
        self.launch = launch
        self._capturing = capturing
        self.handles = handles
        self._sights: dict[tuple[int, ...], int] = {}  # launches without a graph
        self._graphs: dict[tuple[int, ...], Replay] = {}

    def enqueue(self, stream: int, addresses: tuple[int, ...], *, is_captured: bool) -> None:
        """Enqueue the launch for fields at these addresses: as a graph, unless it is captured."""
        if self._capturing and not is_captured:
            graph = self._graphs.get(addresses) or self._make(addresses)
            if graph is not None:
                graph.enqueue(stream)
                return
        self.pointers[:] = [*addresses]
        self.launch.enqueue(stream)

    def _make(self, addresses: tuple[int, ...]) -> Replay | None:
        """Return a graph for fields that came often enough, else None."""
        sights, is_full = self._sights, len(self._graphs) == _MAX_GRAPHS
        count = sights.get(addresses, 0)
        if count < (_SIGHTS_TO_REPLACE if is_full else 1):
            if len(sights) >= _MAX_SEEN:
                sights.clear()
            sights[addresses] = count + 1
            return None
        if is_full:
            oldest = next(iter(self._graphs))
            self.handles.pop(key_of(oldest))
            self._graphs.pop(oldest).close()
        del sights[addresses]
        self.pointers[:] = [*addresses]
        graph = Replay(self.launch, self._capturing, self._where)
        if graph.needs_host:  # which takes longer than the launches
            self._capturing = 0
            graph.close()
            return None
        self._graphs[addresses] = graph
        self.handles[key_of(addresses)] = graph.handle
        return graph

    def close(self) -> None:
        self.handles.clear()
        for graph in self._graphs.values():
            graph.close()
        self._graphs = {}

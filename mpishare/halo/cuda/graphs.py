"""CUDA graphs of a launch, cached by the addresses of the fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.backends.driver import Launch, Replay

if TYPE_CHECKING:
    from mpishare.halo.cuda.kernels import Launcher

_MAX_GRAPHS = 16
_MAX_SEEN = 1024


def key_of(addresses: tuple[int, ...]) -> Any:
    """Return the key of the fields at these addresses: a bare int where there is one field."""
    return addresses if len(addresses) > 1 else addresses[0]


class GraphCache:
    """A launch, and graphs of it for fields that come a second time. Local.

    Parameters
    ----------
    launcher : Launcher
        The launcher of `launch`.
    launch : Launch
        The prepared launch.
    capturing : int
        A stream on which it may be captured.
    handles : dict
        Where the handles of the graphs are published, by `key_of`.
    """

    def __init__(
        self, launcher: Launcher, launch: Launch, capturing: int, handles: dict[Any, int]
    ) -> None:
        self._pointers = launcher.pointers
        self._where = launcher.where
        self._launch = launch
        self._capturing = capturing
        self._handles = handles
        self._seen: set[tuple[int, ...]] = set()
        self._graphs: dict[tuple[int, ...], Replay] = {}

    def enqueue(self, stream: int, addresses: tuple[int, ...], *, is_captured: bool) -> None:
        """Enqueue the launch for fields at these addresses; as a graph unless it is captured."""
        graph = self._graphs.get(addresses)
        if graph is not None and not is_captured:
            graph.enqueue(stream)
            return
        self._pointers[:] = [*addresses]
        if addresses in self._seen and not is_captured:
            if len(self._graphs) == _MAX_GRAPHS:
                oldest = next(iter(self._graphs))
                self._handles.pop(key_of(oldest))
                self._graphs.pop(oldest).close()
            graph = self._graphs[addresses] = Replay(self._launch, self._capturing, self._where)
            self._handles[key_of(addresses)] = graph.handle
            graph.enqueue(stream)
            return
        self._launch.enqueue(stream)
        if len(self._seen) >= _MAX_SEEN:
            self._seen.clear()
        self._seen.add(addresses)

    def close(self) -> None:
        """Destroy the graphs."""
        self._handles.clear()
        for graph in self._graphs.values():
            graph.close()
        self._graphs = {}

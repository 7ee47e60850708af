"""What windows, channels and pools call to serve processes outside the job.

`mpishare.view`, above them, implements it, and `Node` hands it in by `NodeContext.publisher`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpishare.memory.memory import ArrayLayout
    from mpishare.runtime.context import NodeContext
    from mpishare.runtime.stream_chain import StreamChain
    from mpishare.windows.pool_blocks import OwnBlocks

MOST_LAG = 1 << 12  # frames that a viewer of a channel may be behind
_NONE: Mapping[str, Any] = {}


class Publication(Protocol):
    """A named window, or a channel's frames, for processes that `attach`."""

    name: str
    job: str
    paths: list[str]  # of the segments' files by rank, empty for those without

    def take(
        self, array: Any, chain: StreamChain, stream: Any, numbers: Mapping[str, Any] = _NONE
    ) -> None: ...
    def end(self) -> None: ...
    def reduce(self, *, writable: bool) -> Any: ...
    def detach_viewers(self, call: str) -> list[int]: ...
    def abandon(self) -> None: ...
    def discard(self) -> None: ...


class PoolServer(Protocol):
    """The owner's end of `mpishare.open_handle`."""

    address: str

    @property
    def openers(self) -> list[int]: ...
    def end(self) -> bool: ...
    def close(self) -> None: ...


class Publisher(Protocol):
    def publish(
        self,
        context: NodeContext,
        call: str,
        name: str,
        segments: Mapping[int, ArrayLayout],
        handles: Mapping[int, str],
        lag: int = 0,
    ) -> Publication: ...
    def serve_pool(self, context: NodeContext, key: bytes, blocks: OwnBlocks) -> PoolServer: ...

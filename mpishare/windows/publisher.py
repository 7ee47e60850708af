"""What windows and channels call to serve processes outside the job, and say of these.

`mpishare.view`, above them, implements it, and `Node` hands it in by `NodeContext.publish`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mpishare.runtime.context import NodeContext
    from mpishare.runtime.stream_chain import StreamChain

# The time that closing a window or a pool leaves to processes that map its memory on a GPU.
DETACH_S = 3.0
MOST_LAG = 1 << 12  # frames that a viewer of a channel may be behind
NO_NUMBERS: Mapping[str, Any] = MappingProxyType({})


class Publication(Protocol):
    """A named window, or a channel's frames, for processes that `attach`."""

    name: str
    job: str
    paths: list[str]  # of the segments' files by rank, empty for those without

    def take(
        self, array: Any, chain: StreamChain, stream: Any, numbers: Mapping[str, Any] = NO_NUMBERS
    ) -> None: ...
    def end(self) -> None: ...
    def reduce(self, *, writable: bool) -> Any: ...
    def detach_viewers(self, call: str) -> list[int]: ...
    def abandon(self) -> None: ...
    def discard(self) -> None: ...


def warn_if_kept(
    context: NodeContext, name: str, visitors: Sequence[int], *, is_held: bool, stacklevel: int
) -> None:
    """Warn that memory stays, for processes outside the job or for arrays of this rank."""
    if visitors:
        why = f"processes {visitors} outside the job map it: its memory is kept"
        context.warn(f"{name} was closed while {why}", stacklevel + 1)
    # At the end of a node's block its arrays still have their names in the program.
    if is_held and context.to_warn is None:
        why = "arrays of it are held: its memory stays mapped until they are gone"
        context.warn(f"{name} was closed while {why}", stacklevel + 1)

"""What moves the cells of a plan, as the plan sees it: on the host and on CUDA alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class Engine(Protocol):
    """Moves the cells of one plan, in one direction: to the ghosts, or back from them."""

    staging_nbytes: int

    def take(self, fields: Sequence[Any]) -> list[Any]:
        """Check the arrays of a call and return them as the other methods want them."""
        ...

    def quick(self, fields: Sequence[Any], stream: Any) -> bool:
        """Exchange fields that need no look, or return False with nothing done."""
        ...

    def start(self, arrays: list[Any], stream: Any) -> None:
        """Begin."""
        ...

    def wait(self, arrays: list[Any], stream: Any) -> None:
        """End."""
        ...

    def exchange(self, arrays: list[Any], stream: Any) -> None:
        """Do both."""
        ...

    def is_captured(self, fields: Sequence[Any], stream: Any) -> bool:
        """Whether the stream of a call is being captured into a graph."""
        ...

    def pending(self) -> list[int]:
        """Ranks of the node that have not called what this rank has."""
        ...

    def leave(self, until: float) -> None:
        """Tell the other ranks if all that was begun is over by then: this process ends."""
        ...

    def drain(self) -> None:
        """Wait until nothing of it is under way on this rank."""
        ...

    def release(self) -> None:
        """Let go of what this rank imported."""
        ...

    def close(self) -> None:
        """Free what this rank owns, once all have released."""
        ...

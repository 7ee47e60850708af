"""What the engines of all plans on the host have in common: calls block, and are over then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class HostPlanEngine:
    """Calls that are over when they return, and memory that each rank unmaps in `close`."""

    def is_captured(self, fields: Sequence[Any], stream: Any) -> bool:  # noqa: ARG002  no streams
        """Return False: there is no stream."""
        return False

    def pending(self) -> list[int]:
        """Return no ranks: waits on the host report their own stragglers."""
        return []

    def finish_at_exit(self, deadline: float) -> None:
        """Do nothing: all that was begun is over, since calls block."""

    def drain(self) -> None:
        """Do nothing: calls block."""

    def release(self) -> None:
        """Do nothing: each rank unmaps the shared memory in `close`."""

"""A frame: what a viewer keeps of a snapshot."""

from __future__ import annotations

from typing import Any


class Frame:
    """A snapshot: copies that belong to this process.

    Attributes
    ----------
    number : int
        From 1: how often each rank had called `Window.snapshot`.
    """

    def __init__(self, number: int, arrays: dict[int, Any]) -> None:
        self.number = number
        self._arrays = arrays

    @property
    def array(self) -> Any:
        """The whole window, or the first rank's segment where each rank has one."""
        return next(iter(self._arrays.values()))

    def segment(self, rank: int) -> Any:
        """Return that rank's segment; ValueError if it has none."""
        if rank not in self._arrays:
            raise ValueError(f"rank {rank!r} has no segment; ranks {list(self._arrays)} do")
        return self._arrays[rank]

    def __repr__(self) -> str:
        """Name the number and the ranks."""
        return f"<mpishare frame {self.number} of ranks {list(self._arrays)}>"

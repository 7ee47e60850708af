"""What belongs to one process and cannot be sent to another."""

from __future__ import annotations

from typing import Any


class Local:
    """Refuses to be pickled, by name: handles and mappings mean nothing elsewhere."""

    def __reduce__(self) -> Any:
        """Raise `TypeError`."""
        raise TypeError(
            f"an mpishare {type(self).__name__} cannot be pickled: it belongs to one process"
        )

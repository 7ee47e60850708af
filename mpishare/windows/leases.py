"""What keeps the memory of a closed window or pool: other processes, and arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.runtime.context import NodeContext

# The time that closing a window or a pool leaves to processes that map its memory on a GPU.
LET_GO_S = 3.0


def warn_if_kept(
    context: NodeContext, name: str, visitors: Sequence[int], *, is_held: bool, stacklevel: int
) -> None:
    """Warn that memory stays, for processes outside the job or for arrays of this rank."""
    if visitors:
        why = f"processes {visitors} outside the job map it: its memory is kept"
        context.warn(f"{name} was closed while {why}", stacklevel + 1)
    # At the end of a node's block its arrays still have their names in the program.
    if is_held and not context.is_closing:
        why = "arrays of it are held: its memory stays mapped until they are gone"
        context.warn(f"{name} was closed while {why}", stacklevel + 1)

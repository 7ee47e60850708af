"""Undo of a collective call that failed: importers release memory before its owner frees it."""

from __future__ import annotations

import traceback
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpishare.coordination.agreement import is_agreed
from mpishare.errors import MpiShareError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpishare.runtime.context import NodeContext


@dataclass(frozen=True)
class Undo:
    """How to undo the steps of a call so far, each stack in the reverse order of its additions."""

    local: ExitStack = field(default_factory=ExitStack)  # what no other rank uses
    opened: ExitStack = field(default_factory=ExitStack)  # memory of other ranks
    made: ExitStack = field(default_factory=ExitStack)  # memory that other ranks may have opened
    # What other ranks open memory by: it ends with the block, whether that fails or not.
    lent: ExitStack = field(default_factory=ExitStack)


@contextmanager
def undoing(context: NodeContext, call: str) -> Iterator[Undo]:
    """Undo the steps within the block if one of them fails, as it does on all ranks."""
    undo = Undo()
    try:
        with undo.lent:
            yield undo
    except BaseException as error:
        if not is_agreed(error):
            # The others are in the next step, and must not take the one below for this rank's part.
            context.agreement.leave(call, error)
        _clear_frames(error)
        undo.local.close()
        try:
            context.agreement.step(call, undo.opened.close)
        except MpiShareError:
            # The node itself is broken: others may still map this memory, so it stays until the end
            # of the process. The first error explains more than this one.
            pass
        else:
            undo.made.close()
        raise


def _clear_frames(error: BaseException | None) -> None:
    """Release the arrays in our frames of an error: their memory is about to be freed.

    Those of the user, and of an error that the user handles, stay for debuggers.
    """
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if str(frame.f_globals.get("__name__")).startswith("mpishare."):
                with suppress(RuntimeError):  # it still runs
                    frame.clear()
        error = error.__cause__ or error.__context__

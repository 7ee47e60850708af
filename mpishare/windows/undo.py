"""Undo of a collective call that failed: importers release memory before its owner frees it."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from mpishare.coordination.agreement import is_agreed
from mpishare.errors import MpiShareError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpishare.runtime.context import NodeContext


@contextmanager
def undoing(context: NodeContext, call: str) -> Iterator[ExitStack]:
    """Undo the steps within the block if one of them fails, as it does on all ranks."""
    with ExitStack() as undo:
        try:
            yield undo
        except BaseException as error:
            if not is_agreed(error):
                # The others are in the next step, and must not take a later one for this rank's.
                context.life.leave(call, error)
            raise
        undo.pop_all()


def meet_in(undo: ExitStack, context: NodeContext, call: str) -> None:
    """Let what was added so far be undone only once all ranks have undone what comes next."""

    def meet() -> None:
        try:
            context.agreement.step(call, int)
        except MpiShareError:
            # The node itself is broken: others may still map this memory, so it stays until the end
            # of the process. The first error explains more than this one.
            undo.pop_all()

    undo.callback(meet)

"""The one way in which the host waits: look, give the core away, look again, until a deadline."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def poll(
    is_done: Callable[[], object],
    timeout_s: float,
    look: Callable[[], object] | None = None,
    *,
    pause_s: float = 0.0,
) -> bool:
    """Wait on the host until `is_done`, at most `timeout_s`; return whether it came.

    Parameters
    ----------
    is_done : callable
        What is waited for.
    timeout_s : float, seconds
        The deadline, counted from now.
    look : callable, optional
        Called between two questions: checks that the others live, lets MPI progress. What it
        raises ends the wait.
    pause_s : float, seconds
        How long to sleep between two questions, where nobody is in a hurry. Default: the core is
        given away, but the wait goes on at once.
    """
    deadline = time.monotonic() + timeout_s
    while not is_done():
        if pause_s:
            time.sleep(pause_s)
        else:
            # With more ranks than cores, the rank that is waited for may need this very core.
            os.sched_yield()
        if look is not None:
            look()
        # Asked once more: this process may have been stopped since it asked.
        if time.monotonic() > deadline and not is_done():
            return False
    return True

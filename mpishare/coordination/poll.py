"""The loop in which the host waits for ranks: check, yield the core, check again, until a deadline.

A long wait sleeps between two checks, for a share of the time that it has taken so far. So no
arrival is seen late by more than that share, and a long wait leaves nearly all of a core to others,
or to the processor's own clock.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# Checks of a word before a wait begins to watch deadlines and other ranks.
SPINS = 400

_BRIEF_LOOKS = 200
_SLEPT_SHARE = 1 / 256
_MIN_SLEEP_S, _MAX_SLEEP_S = 50e-6, 2e-3  # Linux wakes a process up to 50 us late
# A wait that takes this long is worth a warning that names the stragglers.
STRAGGLER_S = 30.0


def yield_core() -> None:
    """Let another process run on this core; it may be the awaited rank."""
    try:
        os.sched_yield()
    except OSError:  # refused, as by a sandbox
        time.sleep(0)


def comes_at_once(is_done: Callable[[], object]) -> bool:
    """Whether a wait is over before another rank needs to know of it, as most are."""
    for _ in range(_BRIEF_LOOKS):
        if is_done():
            return True
        yield_core()
    return False


def spin_until(view: memoryview[int], slot: int, value: int, spins_per_yield: int) -> bool:
    """Spin until a counter has reached a value; return False if that takes too long for a spin.

    The caller then waits with a deadline, and a watch over the other ranks.
    """
    for spin in range(1, SPINS):
        if view[slot] >= value:
            return True
        if not spin % spins_per_yield:
            yield_core()
    return view[slot] >= value


def poll(
    is_done: Callable[[], object],
    timeout_s: float,
    look: Callable[[], object] | None = None,
    *,
    warn: Callable[[float], object] | None = None,
    pause_s: float = 0.0,
    sleeps: bool = True,
) -> bool:
    """Wait on the host until `is_done`, at most `timeout_s` from now; return whether it came.

    `look` is called between two checks, to watch the other ranks and to let MPI progress; its
    exception ends the wait. `warn` is called once, with the seconds waited, after `STRAGGLER_S`.
    `pause_s` is the sleep between two checks where latency does not matter; by default a share of
    the time waited so far, and none unless it `sleeps`.
    """
    begin = time.monotonic()
    waited_s = 0.0
    while not is_done():
        sleep_s = pause_s or min(_SLEPT_SHARE * waited_s, _MAX_SLEEP_S)
        if sleeps and sleep_s >= _MIN_SLEEP_S:
            time.sleep(sleep_s)
        else:
            # With more ranks than cores, the awaited rank may need this very core.
            yield_core()
        if look is not None:
            look()
        waited_s = time.monotonic() - begin
        # Checked once more: this process may have been suspended since the last check.
        if waited_s > timeout_s and not is_done():
            return False
        if warn is not None and waited_s > STRAGGLER_S and not is_done():
            warn(waited_s)
            warn = None
    return True

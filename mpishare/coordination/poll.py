"""The loops in which the host waits for ranks: until a deadline, or in the rounds of a barrier.

Check, yield the core, check again. A long wait sleeps between two checks, for a share of the time
that it has taken so far. So no arrival is seen late by more than that share, and a long wait leaves
nearly all of a core to others, or to the processor's own clock.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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


# --- dissemination barriers: a schedule of the fewest microseconds, and its waits in Python

# On the host a rank waits for at most one rank less in each round. A round takes about as long as
# words of four other cores: on 32 cores one round of 31 waits took 5.7 us, five rounds of one 2.8,
# two rounds of up to seven 2.5, and in compiled code 1.5, 1.4 and 1.3.
RADIX = 8


def rounds(rank: int, size: int, radix: int = RADIX) -> list[list[int]]:
    """Return for each round the ranks to wait for, once this one has published its arrival.

    Dissemination (Hensgen, Finkel, Manber 1988), by n ways (Hoefler et al. 2006): in round k rank r
    signals the ranks that wait for it, and waits for r - j * radix^k, 0 < j < radix. After the last
    round each has waited, by way of others, for all. With a radix of `size` or more there is one
    round.
    """
    found: list[list[int]] = []
    step = 1
    while step < size or not found:
        found.append([(rank - by) % size for by in range(step, min(radix * step, size), step)])
        step *= radix
    return found


class Fence:
    """The waits of a fence or a barrier, in place of the compiled ones, by the same words.

    In each round a rank raises the word of its slot, and waits for those of others.
    """

    def __init__(
        self,
        words: memoryview[int],
        rounds: Sequence[tuple[int, Sequence[int]]],
        spins_per_yield: int,
        memory_barrier: Callable[[], object],
    ) -> None:
        self._words, self._rounds = words, rounds
        self._spins_per_yield = spins_per_yield
        self._memory_barrier = memory_barrier

    def meet(self, value: int) -> int:
        """Go through the rounds of an epoch.

        Return -1, or the slot that was waited for in vain for a while: then call it again.
        """
        words = self._words
        for mine, awaited in self._rounds:
            self._memory_barrier()
            words[mine] = value
            for slot in awaited:
                if not spin_until(words, slot, value, self._spins_per_yield):
                    return slot
        self._memory_barrier()
        return -1

"""Dissemination barriers: a schedule of the fewest microseconds, and its waits in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishare.coordination.poll import spin_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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

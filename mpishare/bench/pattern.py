"""Words that tell their owner, side, step and place, so that a stale or stray one is seen."""

from __future__ import annotations

from typing import Any

#: No pattern has this word: what a copy must overwrite is filled with it.
POISON = 0xFFFF_FFFF_FFFF_FFFF


def word(owner: int, side: int, step: int) -> int:
    """Return the first word of a face: 15 bits of owner, 4 of side, 12 of step, 32 of place.

    Local.
    """
    return (owner & 0x7FFF) << 48 | (side & 0xF) << 44 | (step & 0xFFF) << 32


class Pattern:
    """Fill arrays of `count` 64-bit words, and count the words that are not what they should be.

    Local. Stream-ordered on CUDA: only `wrong` waits for the GPU.
    """

    def __init__(self, xp: Any, count: int) -> None:
        self._xp = xp
        self._place = xp.arange(count, dtype="u8")
        self._expected = xp.empty(count, "u8")
        self._differs = xp.empty(count, bool)
        self._wrong = xp.zeros((), "i8")
        # Every kernel is loaded here: loading one later waits for whatever the stream waits for.
        self.fill(self._expected, 0, 0, 0)
        self.poison(self._expected)
        self.count(self._expected, 0, 0, 0)
        self.wrong()

    def fill(self, out: Any, owner: int, side: int, step: int) -> None:
        """Write the words of `owner`'s face at `side` in `step` to `out`."""
        self._xp.add(self._place, self._xp.uint64(word(owner, side, step)), out=out)

    def poison(self, out: Any) -> None:
        """Write the word that no face has to `out`."""
        out.fill(self._xp.uint64(POISON))

    def count(self, got: Any, owner: int, side: int, step: int) -> None:
        """Add to `wrong` how many words of `got` are not those that `fill` wrote."""
        self.fill(self._expected, owner, side, step)
        self._xp.not_equal(got, self._expected, out=self._differs)
        self._wrong += self._xp.count_nonzero(self._differs)

    def wrong(self) -> int:
        """Return how many words were wrong since the last call; waits for the GPU."""
        wrong = int(self._wrong)
        self._wrong.fill(0)
        return wrong

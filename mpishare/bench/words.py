"""Numbers as words for people."""

from __future__ import annotations


def nbytes_words(nbytes: int) -> str:
    """Return a size in the largest unit that it reaches: ``8 B``, ``64 KiB``, ``1.5 MiB``.

    Local.
    """
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes} B"


def us_words(us: float) -> str:
    """Return microseconds with three digits that count.

    Local.
    """
    if us >= 100:
        return f"{us:,.0f}"
    return f"{us:.1f}" if us >= 10 else f"{us:.2f}"

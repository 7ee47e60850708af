"""CUDA sources with their headers inserted, since the run-time compiler has no include folder."""

from __future__ import annotations

import re
from pathlib import Path

from mpishare.memory.numbers import ADDED, NUMBERS

_INCLUDE = re.compile(r'^#include "(.+)"\n', re.MULTILINE)


def source(path: Path) -> str:
    """Return a source with each header in place, once.

    A header is of the source's own folder, of this one, or of `native/`, which C has too.
    """
    here = Path(__file__).parent
    folders = path.parent, here, here.parents[1] / "native"
    seen: set[str] = set()

    def inserted(text: str) -> str:
        return _INCLUDE.sub(lambda found: header(found[1]), text)

    def header(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        found = next(folder / name for folder in folders if (folder / name).exists())
        return inserted(found.read_text())

    return _each_added() + inserted(path.read_text())


def _each_added() -> str:
    """Return the list of the numbers that kernels add, which they choose from by their places.

    Complex numbers are added as two reals, signed integers as unsigned ones.
    """
    cases = " ".join(f"CASE({at}, {NUMBERS[name].kernel})" for at, name in enumerate(ADDED))
    return f"#define EACH_ADDED(CASE) {cases}\n#define N_ADDED {len(ADDED)}\n"

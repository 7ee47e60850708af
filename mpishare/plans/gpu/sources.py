"""CUDA sources with their headers inserted, since the run-time compiler has no include folder."""

from __future__ import annotations

import re
from pathlib import Path

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

    return inserted(path.read_text())

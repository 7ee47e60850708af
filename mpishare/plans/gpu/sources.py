"""CUDA sources with their headers inserted, since the run-time compiler has no include folder."""

from __future__ import annotations

import re
from pathlib import Path

_INCLUDE = re.compile(r'^#include "(.+)"\n', re.MULTILINE)


def source(path: Path) -> str:
    """Return a source with each header in place, once: of its own folder, or of this one."""
    seen: set[str] = set()

    def inserted(text: str) -> str:
        return _INCLUDE.sub(lambda found: header(found[1]), text)

    def header(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        own = path.parent / name
        return inserted((own if own.exists() else Path(__file__).parent / name).read_text())

    return inserted(path.read_text())

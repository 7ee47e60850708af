"""Read the JSON of a run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from mpishare.bench.launch import UsageError
from mpishare.bench.rows import Row

_NEEDED = [field.name for field in dataclasses.fields(Row) if field.default is dataclasses.MISSING]


def read_run(name: str) -> tuple[dict[str, Any], list[Row]]:
    """Return the header and the rows of a run.

    Local.

    Raises
    ------
    UsageError
        If the file cannot be read, or is not the JSON of a run.
    """
    try:
        found = json.loads(Path(name).read_text())
    except OSError as exc:
        raise UsageError(f"{name}: {exc.strerror}") from None
    except ValueError as exc:
        raise UsageError(f"{name}: no JSON: {exc}") from None
    if not (isinstance(found, dict) and isinstance(found.get("header"), dict)):
        raise UsageError(f"{name}: not a run of the bench: it has no header")
    rows = found.get("rows")
    if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
        raise UsageError(f"{name}: not a run of the bench: it has no rows")
    for row in rows:
        missing = [key for key in _NEEDED if key not in row]
        if missing:
            raise UsageError(f"{name}: not a run of the bench: a row without {missing[0]!r}")
    known = {field.name for field in dataclasses.fields(Row)}
    # A file may be of another revision, with more keys than this one knows.
    return found["header"], [
        Row(**{key: value for key, value in row.items() if key in known}) for row in rows
    ]

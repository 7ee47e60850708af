"""The list of attachable windows on this machine, with their viewers."""

from __future__ import annotations

from typing import Any

from mpishare.errors import MpiShareError, describe
from mpishare.view.description import Description
from mpishare.view.names import listed, visit_mine

_ANSWER_S = 2.0


def attachable() -> list[dict[str, Any]]:
    """Return a description of each named window of this user on this machine. Host-blocking.

    Each has ``name`` and ``job``; then ``dtype``, ``shapes`` and ``ranks`` of the segments,
    ``backend``, ``pid`` of the leader and ``viewers``, or the ``error`` of one that does not
    answer.
    """
    found = []
    visits, full = visit_mine(listed(), _ANSWER_S, _ANSWER_S)
    for window, visit in visits.items():
        try:
            with visit:
                facts = _facts(Description.ask(visit))
        except MpiShareError as error:
            facts = {"error": describe(error)}
        found.append({"name": window.name, "job": window.job} | facts)
    why = "it takes no connections: its process is stopped, or it is another user's"
    return found + [{"name": window.name, "job": window.job, "error": why} for window in full]


def _facts(window: Description) -> dict[str, Any]:
    return {
        "dtype": str(window.dtype),
        "shapes": [list(segment.layout.shape) for segment in window.segments],
        "ranks": [segment.rank for segment in window.segments],
        "backend": window.backend,
        "pid": window.pid,
        "viewers": list(window.viewers),
    }


def as_text(windows: list[dict[str, Any]]) -> str:
    if not windows:
        return (
            "No window of this user can be attached to on this machine (and network namespace).\n"
        )
    return "".join(_line(window) for window in windows)


def _line(window: dict[str, Any]) -> str:
    begin = f"{window['name']}  job {window['job']}: "
    if "error" in window:
        return f"{begin}{window['error']}\n"
    shapes = ", ".join(
        f"{tuple(shape)} of rank {rank}"
        for rank, shape in zip(window["ranks"], window["shapes"], strict=True)
    )
    viewers = ", ".join(map(str, window["viewers"])) or "none"
    return (
        f"{begin}{window['dtype']}, {shapes}; backend {window['backend']}, leader's pid "
        f"{window['pid']}, viewers {viewers}\n"
    )

"""What can be attached to on this machine, and who has attached."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np

from mpishare.errors import MpiShareError, describe
from mpishare.memory.door import Visit
from mpishare.viewers import page as layout
from mpishare.viewers.names import door_name, my_windows

_ANSWER_S = 2.0


def attachable() -> list[dict[str, Any]]:
    """Ask each named window of this user on this machine what it is. Local, host-blocking.

    Returns
    -------
    list of dict
        For each: ``name``, ``job``; then ``dtype``, ``shapes`` and ``ranks`` of the segments,
        ``backend``, ``pid`` of the leader and ``viewers``, or the ``error`` of one that does not
        answer.
    """
    found = []
    for window in my_windows():
        entry: dict[str, Any] = {"name": window.name, "job": window.job}
        try:
            with Visit(door_name(window.job, window.name), _ANSWER_S) as visit:
                told, _ = visit.ask({"version": layout.VERSION})
            entry |= _described(told)
        except MpiShareError as error:
            entry["error"] = describe(error)
        found.append(entry)
    return found


def _described(told: dict[str, Any]) -> dict[str, Any]:
    if told["version"] != layout.VERSION:
        return {"error": f"of another mpishare: version {told['version']} of the protocol"}
    shapes = {rank: shape for rank, shape in enumerate(told["shapes"]) if shape is not None}
    return {
        "dtype": str(np.lib.format.descr_to_dtype(ast.literal_eval(told["dtype"]))),
        "shapes": list(shapes.values()),
        "ranks": list(shapes),
        "backend": told["backend"],
        "pid": told["pid"],
        "viewers": told["viewers"],
    }


def as_text(windows: list[dict[str, Any]]) -> str:
    """Return the list as lines to read."""
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

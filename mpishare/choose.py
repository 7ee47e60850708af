"""Which backend all ranks use: one decision, from what every rank was asked for and has."""

from __future__ import annotations

import logging
import math
import os
from typing import TYPE_CHECKING, Any

from mpishare.agree import require_same
from mpishare.errors import UnsupportedError, words
from mpishare.messages import gather, raise_together

if TYPE_CHECKING:
    from mpi4py import MPI

log = logging.getLogger("mpishare")

BACKENDS = ("auto", "cuda", "host")


def choose_backend(
    whole: MPI.Comm, call: str, backend: Any, timeout_s: Any, deadline_s: float
) -> tuple[str, str | None]:
    """Return the backend of all ranks, and why it is the host's if nobody asked for that.

    Collective over `whole`, host-blocking.
    """
    mine: dict[str, Any] = {"error": None, "missing": None}
    error: BaseException | None = None
    try:
        mine["arguments"] = _check_arguments(backend, timeout_s)
        mine["missing"] = _why_no_gpu(mine["arguments"]["backend"])
    except Exception as caught:
        error = caught
        mine["error"] = words(caught)
    told = gather(whole, call, mine, deadline_s)
    raise_together(call, error, [each["error"] for each in told])
    require_same(call, [each["arguments"] for each in told], whole.rank)
    if told[0]["arguments"]["backend"] == "host":
        return "host", None
    lacking = {rank: each["missing"] for rank, each in enumerate(told) if each["missing"]}
    if not lacking:
        return "cuda", None
    rank, why = next(iter(lacking.items()))
    if len(lacking) < whole.size and whole.rank == 0:
        log.warning(
            "all ranks use the host backend, though %d of %d have a GPU: rank %d: %s",
            whole.size - len(lacking),
            whole.size,
            rank,
            why,
        )
    return "host", why


def _check_arguments(backend: Any, timeout_s: Any) -> dict[str, Any]:
    forced = os.environ.get("MPISHARE_BACKEND")
    wanted = forced or backend
    if wanted not in BACKENDS:
        name = "the environment variable MPISHARE_BACKEND" if forced else "backend"
        raise ValueError(f"{name} must be one of {BACKENDS}, not {wanted!r}")
    if not is_duration(timeout_s):
        raise ValueError(f"timeout_s must be a positive number of seconds, not {timeout_s!r}")
    return {"backend": wanted, "timeout_s": timeout_s}


def is_duration(value: Any) -> bool:
    """Whether a value is a positive number of seconds. Local."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf


def _why_no_gpu(wanted: str) -> str | None:
    if wanted == "host":
        return None
    from mpishare.backends import available

    why = available.missing()
    if wanted == "cuda" and why:
        forced = " (MPISHARE_BACKEND)" if os.environ.get("MPISHARE_BACKEND") else ""
        raise UnsupportedError(f"backend='cuda'{forced} failed: {why}")
    return why

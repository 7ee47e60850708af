"""The compiled part of the host backend: C that the machine's own compiler builds at first use.

The *.c files here are one extension module. It is found in the user's cache, or built once per
source, compiler and Python. Without a compiler everything works in Python, only slower: the two
use the same words of shared memory, so that ranks of both kinds work together. To add a function:
write it in a *.c file here, declare it in `module.h`, and name it in the table of `module.c`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from mpishare.compiled.builder import BuildError, build, load, wanted
from mpishare.errors import UnsupportedError, name_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("mpishare")

_ASKED = "MPISHARE_HOST_CODE=python asks for it"


def find(
    step: Callable[[Callable[[], Any]], list[Any]], *, is_builder: bool, timeout_s: float
) -> tuple[Any, str]:
    """Return the module, and why ranks have none: empty where all have. Collective, host-blocking.

    Parameters
    ----------
    step : callable
        Does a piece of work on all ranks, and raises on all where it fails on one.
    is_builder : bool
        Whether this rank builds it for the others, where it is in no cache yet.
    timeout_s : float, seconds
        How long the others wait for it: the compiler may take half of that.

    Raises
    ------
    UnsupportedError
        On all ranks, if ``MPISHARE_HOST_CODE=compiled`` asks for it and it cannot be built, or the
        rank that builds it is asked for none.
    """

    def make() -> tuple[str, str, str]:
        choice = wanted()  # a wrong one is an error on all ranks
        if not is_builder:
            return choice, "", ""
        if choice == "python":
            return choice, "", f"{_ASKED}, on the rank that builds it"
        try:
            return choice, str(build(timeout_s / 2)), ""
        except BuildError as error:
            return choice, "", str(error)

    told = step(make)
    builder = next(rank for rank, (_, path, why) in enumerate(told) if path or why)
    choice, path, reason = told[builder]
    asking = [rank for rank, (theirs, *_) in enumerate(told) if theirs == "compiled"]
    if asking and choice == "python":
        raise UnsupportedError(
            f"MPISHARE_HOST_CODE is 'python' on rank {builder} and 'compiled' on "
            f"{name_ranks(asking)}: set it alike on all ranks"
        )
    module = None

    def take() -> str:
        nonlocal module
        choice = wanted()
        if choice == "python":
            return _ASKED
        why: str = reason
        if path:
            try:
                module = load(path)
            except BuildError as error:
                why = str(error)
        if module is None and choice == "compiled":
            raise UnsupportedError(
                "MPISHARE_HOST_CODE=compiled asks for the compiled part of the host backend, which "
                f"cannot be had: {why}"
            )
        return why

    reasons = step(take)
    without = [rank for rank, why in enumerate(reasons) if why]
    why = reasons[without[0]] if without else ""
    if 0 < len(without) < len(reasons):  # ranks may differ in what they ask for, and in their files
        why = f"{name_ranks(without)}: {why}"
    if is_builder and why:
        level = logging.INFO if why.endswith(_ASKED) else logging.WARNING
        log.log(level, "halo exchanges and fences on the host are made in Python: %s", why)
    return module, why

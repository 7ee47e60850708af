"""The compiled part of the host backend, an extension module: built when mpishare is installed.

Where it was not, for want of a compiler, shorter Python does the same, slower. Ranks of both kinds
work together: fences use the same words of shared memory, and the plans of such a node no C.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import platform
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpishare.errors import UnsupportedError, name_ranks, warn_once

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = logging.getLogger("mpishare")

_CHOICES = ("", "python", "compiled")
_IN_PYTHON = "halo exchanges and fences on the host are made in Python: %s"
_ASKED = "MPISHARE_HOST_CODE=python asks for it"
_FOLDER = Path(__file__).parent
_FILE = _FOLDER / "_host.abi3.so"
# Processors that show stores in program order and load in order (Intel Software Developer's Manual,
# volume 3, 9.2.2).
_ORDERED_MACHINES = ("x86_64", "AMD64")


def why_missing(reasons: Sequence[str | None], *, is_first: bool) -> str | None:
    """Return why ranks have no module, given the reason of each; None where all have it.

    The first rank logs that some have none.
    """
    without = [rank for rank, why in enumerate(reasons) if why]
    why = reasons[without[0]] if without else None
    if 0 < len(without) < len(reasons):  # ranks may differ in what they ask for, and in their files
        why = f"{name_ranks(without)}: {why}"
    if is_first and why is not None:
        if why.endswith(_ASKED):
            log.info(_IN_PYTHON, why)
        else:
            warn_once(log, _IN_PYTHON, why)
    return why


def choose() -> tuple[Any, str | None]:
    """Return what `load` does, or raise where ``MPISHARE_HOST_CODE`` cannot be followed."""
    choice = os.environ.get("MPISHARE_HOST_CODE", "")
    if choice not in _CHOICES:
        raise ValueError(f"MPISHARE_HOST_CODE={choice!r} is neither 'python' nor 'compiled'")
    if choice == "python":
        return None, _ASKED
    module, why = load()
    if module is None and choice == "compiled":
        raise UnsupportedError(
            "MPISHARE_HOST_CODE=compiled asks for the compiled part of the host backend, which "
            f"cannot be had: {why}"
        )
    return module, why


@functools.cache  # a process keeps the module that it has, and looking takes 0.1 ms
def load() -> tuple[Any, str | None]:
    """Return the extension module and None, or None and the reason."""
    if "t" in sys.abiflags:  # free-threaded
        return None, "it would bring the GIL back to this Python, which has none"
    # In a clone: what is installed has no C, and of its headers the one for kernels.
    sources = [*_FOLDER.glob("*.[ch]")] if any(_FOLDER.glob("*.c")) else []
    built = _changed(_FILE)
    if not _FILE.exists():
        why = "it was not built"
    elif any(_changed(source) > built for source in sources):
        why = "it is older than its sources"
    else:
        try:
            return importlib.import_module("._host", __name__), None
        except ImportError as error:
            why = str(error)
    if sources:
        return None, (
            f"{why}; in {_FOLDER.parents[1]} build it: python setup.py build_ext --inplace, or, "
            "where mpishare is installed, start Python in another folder"
        )
    return None, f"{why}; install mpishare again where there are a C compiler and Python's headers"


def _changed(path: Path) -> float:
    """Return when a file was written; 0 where it is gone, as an editor's files are in no time."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def memory_barrier() -> Callable[[], object]:
    """Return a full memory barrier, where the processor needs one."""
    if platform.machine() in _ORDERED_MACHINES:
        return int  # which does nothing
    module, _ = load()
    return _by_locks(threading.Lock()) if module is None else module.memory_barrier


def _by_locks(lock: threading.Lock) -> Callable[[], None]:
    def barrier() -> None:
        # What comes before is over when the first lock is released; that is before the second one
        # is acquired, and what comes after begins behind that.
        with lock:
            pass
        with lock:
            pass

    return barrier

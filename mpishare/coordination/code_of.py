"""Whose code a file has: the user's, mpishare's own, that of Python or of an installed package."""

from __future__ import annotations

import os
from pathlib import Path

INSTALLED = "-packages/"  # ends the folder of installed packages
_OWN = f"{Path(__file__).parents[1]}/"
_COMPILED = (".pyx", ".pxi")  # of installed packages, which give a path that is none
_PYTHON = (f"{Path(os.__file__).parent}/", "<frozen ")


def is_own(file: str) -> bool:
    return file.startswith(_OWN)


def is_of_python(file: str) -> bool:
    """Whether it is of Python's own library, whose folder may have those of all others in it."""
    return file.startswith(_PYTHON) and INSTALLED not in file and not is_own(file)


def is_of_user(file: str) -> bool:
    is_installed = INSTALLED in file or file.endswith(_COMPILED)
    return not (is_own(file) or is_of_python(file) or is_installed)

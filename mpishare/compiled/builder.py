"""Builds the extension module of `mpishare.compiled` by the system's compiler, into a cache."""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "_mpishare_host"
"""Of the extension module."""

_FOLDER = Path(__file__).parent
# Not -march=native: nodes of several kinds may share the cache.
_FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")
_CHOICES = ("", "python", "compiled")
_WRITABLE_BY_OTHERS = 0o022
_DIGEST_NBYTES = 32


class BuildError(Exception):
    """Why the module cannot be built or loaded: one line."""


def wanted() -> str:
    """Return what ``MPISHARE_HOST_CODE`` asks for: ``python``, ``compiled``, or nothing."""
    choice = os.environ.get("MPISHARE_HOST_CODE", "")
    if choice not in _CHOICES:
        raise ValueError(f"MPISHARE_HOST_CODE={choice!r} is neither 'python' nor 'compiled'")
    return choice


def build(limit_s: float = 120.0) -> Path:
    """Return the path of the module, built where no cache has it. Local; about a second.

    Parameters
    ----------
    limit_s : float, seconds
        How long the compiler may take.

    Raises
    ------
    BuildError
        If it cannot be built.
    """
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise BuildError("it would bring the GIL back to this Python, which has none")
    compilers = _compilers()
    with _naming_files():
        folder = _cache_folder()
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        for compiler in compilers:
            path = folder / f"{NAME}-{_key(compiler)}{suffix}"
            # A node without a compiler takes what another one has built, by whichever of them. One
            # that has its own takes no other's: it may want libraries, or a CPU, of that node.
            if _is_whole(path):
                return path
            if shutil.which(compiler[0]):
                break
        _compile(compiler, path, limit_s)
    return path


@functools.cache
def load(path: str) -> Any:
    """Return the module at a path; loads it once per process."""
    with _naming_files():  # this rank may have other files than the one that built it
        _require_own(Path(path).parent)
        _require_own(Path(path))
        if not _is_whole(Path(path)):
            raise BuildError(f"{path}: it is not there, or not whole")
    loader = importlib.machinery.ExtensionFileLoader(NAME, path)
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    if spec is None:
        raise BuildError(f"{path} is no module")
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise BuildError(str(error)) from None
    return module


@contextmanager
def _naming_files() -> Iterator[None]:
    """Turn errors of the system into a `BuildError`."""
    try:
        yield
    except OSError as error:
        raise BuildError(f"{error.filename or NAME}: {error.strerror}") from None


def _is_whole(path: Path) -> bool:
    """Whether a module is there as it was built: to load a truncated one kills the process."""
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        return False
    return found.endswith(_digest(found[:-_DIGEST_NBYTES]))


def _digest(module: bytes) -> bytes:
    """Return what stands behind the bytes of a module, where no loader looks."""
    return hashlib.sha256(module).digest()


def _compilers() -> list[list[str]]:
    """Return commands of C compilers: ``$CC`` alone, or Python's own and ``cc``."""
    given = os.environ.get("CC", "").strip()
    try:
        words = shlex.split(given or sysconfig.get_config_var("CC") or "cc")
    except ValueError as error:
        raise BuildError(f"CC={given}: {error}") from None
    return [words] if given else [words, ["cc"]]


def _sources() -> list[Path]:
    return sorted(_FOLDER.glob("*.c"))


def _key(compiler: list[str]) -> str:
    """Return what names a build: its source, its compiler, the ABI of libc, Python and NumPy."""
    parts = [*compiler, *_FLAGS, platform.machine(), *platform.libc_ver(), np.__version__]
    parts.append(sysconfig.get_config_var("SOABI") or "")
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in (*_sources(), *sorted(_FOLDER.glob("*.h"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        parent = Path(base).absolute() if base else Path("~").expanduser()
    except RuntimeError as error:
        raise BuildError(f"there is no place for a cache: {error}") from None
    if not (base or parent.is_dir()):
        raise BuildError(f"there is no place for a cache: the home {parent} is not there")
    folder = parent / "mpishare" if base else parent / ".cache" / "mpishare"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"the cache {folder} cannot be made: {error.strerror}") from None
    _require_own(folder)
    return folder


def _require_own(path: Path) -> None:
    """Raise where another user could have put the module there: it would run as this one."""
    found = path.stat()
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & _WRITABLE_BY_OTHERS:
        raise BuildError(f"the cache {path} can be written by other users")


def _compile(compiler: list[str], path: Path, limit_s: float) -> None:
    """Build the module; another node that does so too is no harm, since the last step is atomic."""
    python_h = Path(sysconfig.get_path("include")) / "Python.h"
    if not python_h.exists():
        raise BuildError(f"{python_h} is not there: Python's headers are not installed")
    include = [f"-I{python_h.parent}", f"-I{np.get_include()}"]
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
            made = Path(folder) / "module.so"
            command = [*compiler, *_FLAGS, *include, *map(str, _sources()), "-o", str(made)]
            done = subprocess.run(  # noqa: S603 - the user's compiler
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=limit_s,
                check=False,
            )
            if done.returncode:
                how = f" with exit status {done.returncode} and no output"
                if said := done.stderr.strip() or done.stdout.strip():
                    how = f": {_first_error(said)}"
                raise BuildError(f"{compiler[0]} failed{how}")
            module = made.read_bytes()
            made.write_bytes(module + _digest(module))
            made.chmod(0o700)  # whatever the umask is
            made.replace(path)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{compiler[0]} did not end within {limit_s:g} s") from None


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = (line for line in lines if "error" in line or "failed" in line)  # by ld: failed
    return next(telling, lines[0])

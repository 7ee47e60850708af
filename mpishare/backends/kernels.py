"""Kernels compiled from CUDA sources, once for each set of options.

Not by `cupy.RawModule`: CuPy adds -ftz=true, by which denormal floats are 0, as for NumPy they are
not. Machine code is kept in CuPy's folder, as CuPy keeps its own.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
from pathlib import Path

import cupy
from cupy.cuda import compiler, function, nvrtc


def module(code: str, options: tuple[str, ...] = ()) -> function.Module:
    """Return the kernels of a source, loaded on the current device, to which they belong."""
    return _module(code, ("--std=c++17", *options), cupy.cuda.Device().id)


def kernel(code: str, name: str, options: tuple[str, ...] = ()) -> int:
    """Return the driver's handle of a kernel."""
    return int(module(code, options).get_function(name).ptr)


@functools.cache
def _module(code: str, options: tuple[str, ...], device: int) -> function.Module:
    capability = cupy.cuda.Device(device).compute_capability
    known = repr((code, options, capability, nvrtc.getVersion(), cupy.__version__))
    name = f"mpishare_{hashlib.sha256(known.encode()).hexdigest()}"
    binary = _read(name)
    if not binary:
        binary, _ = compiler.compile_using_nvrtc(code, options, cache_in_memory=True)
        with contextlib.suppress(OSError, RuntimeError):  # no home, or one that is full
            _keep(name, binary)
    made = function.Module()
    made.load(binary)
    return made


def _folder() -> Path:
    return Path(os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache").expanduser()


def _read(name: str) -> bytes:
    """Return what `_keep` has written; empty if there is none, or not all of it."""
    try:
        digest, binary = (_folder() / name).read_bytes().split(b"\n", 1)
    except (OSError, RuntimeError, ValueError):
        return b""
    return binary if hashlib.sha256(binary).hexdigest().encode() == digest else b""


def _keep(name: str, binary: bytes) -> None:
    """Write a file at once, beside other processes that do."""
    place = _folder() / name
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        made = Path(folder, name)
        made.write_bytes(hashlib.sha256(binary).hexdigest().encode() + b"\n" + binary)
        made.replace(place)

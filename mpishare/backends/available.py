"""Whether a GPU can be used here, asked without making a context."""

from __future__ import annotations

import ctypes
import importlib.metadata

from mpishare.errors import UnsupportedError

_NO_DEVICE = 100


def missing() -> str | None:
    """Say why no GPU can be used here; None where one can. Local, makes no context.

    Raises
    ------
    UnsupportedError
        If there is a GPU, but not the Python packages to use it.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "libcuda.so.1 cannot be loaded: no NVIDIA driver here"
    code = library.cuInit(0)
    if code:
        return f"cuInit returned {code}" + (": no GPU is visible" if code == _NO_DEVICE else "")
    count, version = ctypes.c_int(), ctypes.c_int()
    library.cuDeviceGetCount(ctypes.byref(count))
    library.cuDriverGetVersion(ctypes.byref(version))
    if not count.value:
        return "the driver shows no GPU"
    check_packages(version.value // 1000, *_package_versions())
    return None


def _package_versions() -> tuple[str | None, int | None]:
    bindings: str | None
    runtime: int | None
    try:
        bindings = importlib.metadata.version("cuda-bindings")
    except importlib.metadata.PackageNotFoundError:
        bindings = None
    try:
        import cupy

        runtime = cupy.cuda.runtime.runtimeGetVersion() // 1000
    except ImportError:
        runtime = None
    return bindings, runtime


def check_packages(driver: int, bindings: str | None, runtime: int | None) -> None:
    """Raise unless CuPy and cuda-bindings fit the driver and each other. Local.

    Parameters
    ----------
    driver, runtime : int
        CUDA's major version in the driver, and the one CuPy is built for; None without CuPy.
    bindings : str
        The version of cuda-bindings; None without it.
    """
    todo = f"Do: python -m pip install 'mpishare[cu{driver}]'"
    if runtime is None or bindings is None:
        lacking = "CuPy" if runtime is None else "cuda-bindings"
        raise UnsupportedError(f"there is a GPU (CUDA {driver} driver), but no {lacking}. {todo}")
    major = int(bindings.split(".")[0])
    if runtime > driver or major > driver or major != runtime:
        raise UnsupportedError(
            f"cuda-bindings {bindings} and CuPy for CUDA {runtime} do not fit together on a "
            f"driver of CUDA {driver}: all three must be of one major version. {todo}"
        )

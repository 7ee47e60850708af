"""Kernels compiled from CUDA sources, once for each set of options."""

from __future__ import annotations

import functools

import cupy


@functools.cache
def module(code: str, options: tuple[str, ...] = ()) -> cupy.RawModule:
    # CuPy 13 takes C++11 where no standard is named. CuPy appends "-ftz=true", for which denormal
    # floats are 0, as they are not for NumPy: behind "-I" it is the name of a folder, which there
    # need not be, and sources have no headers of other files.
    return cupy.RawModule(code=code, options=("--std=c++17", *options, "-I"))


def kernel(code: str, name: str, options: tuple[str, ...] = ()) -> int:
    """Return the driver's handle of a kernel, loaded on the current device, to which it belongs."""
    return int(module(code, options).get_function(name).kernel.ptr)

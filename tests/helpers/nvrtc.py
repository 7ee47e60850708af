"""CUDA sources compiled by NVRTC, which needs no GPU."""

import ctypes
import functools
import importlib.util
from pathlib import Path

import pytest

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")


@functools.cache
def nvrtc() -> ctypes.CDLL:
    """libnvrtc of the nvidia-cuda-nvrtc wheel, else of the system."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations if spec else [])]
    wheels = [path for folder in folders for path in folder.glob("cu13/lib/libnvrtc.so.13")]
    for name in [*map(str, wheels), "libnvrtc.so.13"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    pytest.fail("no libnvrtc.so.13: install the dependency group nvrtc")


def compile_cuda(text: str, architecture: str, *more: str) -> tuple[bytes, str]:
    """The machine code, empty where it does not compile, and what the compiler said.

    For an architecture like ``compute_90``, PTX.
    """
    kind = "PTX" if architecture.startswith("compute_") else "CUBIN"
    library, program = nvrtc(), ctypes.c_void_p()
    made = library.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None
    )
    assert made == 0
    options = [f"--gpu-architecture={architecture}", "--std=c++17", *more]
    options = [option.encode() for option in options]
    array = (ctypes.c_char_p * len(options))(*options)
    status = library.nvrtcCompileProgram(program, len(options), array)
    nbytes = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(nbytes))
    log = ctypes.create_string_buffer(nbytes.value)
    library.nvrtcGetProgramLog(program, log)
    code = b""
    if status == 0:
        getattr(library, f"nvrtcGet{kind}Size")(program, ctypes.byref(nbytes))
        buffer = ctypes.create_string_buffer(nbytes.value)
        getattr(library, f"nvrtcGet{kind}")(program, buffer)
        code = buffer.raw
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return code, log.value.decode()


def check_compiles(text: str, architecture: str, *more: str) -> None:
    """It compiles, without a warning."""
    code, log = compile_cuda(text, architecture, *more)
    assert code.startswith(b"\x7fELF"), log
    assert log.strip("\0\n ") == "", log

"""Windows inside kernels and C programs: the headers, and the same for Numba and Triton."""

import zlib
from pathlib import Path

__all__ = ["include"]


def include() -> tuple[str, ...]:
    """Return the compiler's options for ``#include <mpishare.cuh>`` and ``<mpishare_open.h>``.

    Local; needs no GPU.

    Returns
    -------
    tuple of str
        For ``cupy.RawModule(options=mpishare.device.include())``, ``cupy.RawKernel``, nvcc and C
        compilers: the folder, and a checksum of ``<mpishare.cuh>``, by which CuPy's cache of
        compiled kernels, which looks into no included file, takes another version's for another
        kernel.
    """
    header = Path(__file__).with_name("mpishare.cuh")
    return f"-I{header.parent}", f"-DMPISHARE_CUH={zlib.crc32(header.read_bytes())}"

"""Send memory to itself by MPI: a program that may end in a segmentation fault or never.

``python mpi_trial.py device|host|unreadable ORDINAL`` ends with exit status 0 where every byte
arrived. It does not import mpishare, nor CuPy, which would compile kernels first.
"""

from __future__ import annotations

import mmap
import resource
import sys
from typing import Any

import numpy as np

#: Libraries move small, middle and large messages in different ways.
_SIZES = (8, 64 << 10, 4 << 20)
_NO_ACCESS = 0  # PROT_NONE


class _Host:
    """Memory of this process, or memory that may not be touched."""

    def __init__(self, nbytes: int, *, is_readable: bool) -> None:
        host = bytearray(nbytes) if is_readable else mmap.mmap(-1, nbytes, prot=_NO_ACCESS)
        self._is_readable = is_readable
        self._array = np.frombuffer(host, "u1")
        self.address = int(self._array.ctypes.data)

    def fill(self, value: int) -> None:
        if self._is_readable:
            self._array[:] = value

    def read(self) -> Any:
        return self._array


class _Device:
    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self.address = int(_cuda("cuMemAlloc", nbytes)[0])

    def fill(self, value: int) -> None:
        _cuda("cuMemsetD8", self.address, value, self._nbytes)
        _cuda("cuCtxSynchronize")

    def read(self) -> Any:
        array = np.empty(self._nbytes, "u1")
        _cuda("cuMemcpyDtoH", array.ctypes.data, self.address, self._nbytes)
        return array


def _cuda(name: str, *arguments: Any) -> Any:
    from cuda.bindings import driver

    code, *values = getattr(driver, name)(*arguments)
    if int(code):
        raise SystemExit(f"{name} returned {code}")
    return values


def _use_device(number: int) -> None:
    _cuda("cuInit", 0)
    (device,) = _cuda("cuDeviceGet", number)
    (context,) = _cuda("cuDevicePrimaryCtxRetain", device)
    _cuda("cuCtxSetCurrent", context)


def _arrives(source: _Host | _Device, target: _Host | _Device, nbytes: int) -> bool:
    """Return whether all bytes of a message arrived, by requests that are started twice."""
    from mpi4py import MPI

    comm = MPI.COMM_SELF
    requests = [
        comm.Recv_init([MPI.buffer.fromaddress(target.address, nbytes), MPI.BYTE], 0),
        comm.Send_init([MPI.buffer.fromaddress(source.address, nbytes), MPI.BYTE], 0),
    ]
    is_right = True
    for value in (0x5A, 0xA5):
        source.fill(value)
        MPI.Prequest.Startall(requests)
        MPI.Request.Waitall(requests)
        is_right &= bool((target.read() == value).all())
    return is_right


def main(kind: str, number: str) -> int:
    """Send every size and return the exit status."""
    # A segmentation fault is an expected result: no core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if kind == "device":
        _use_device(int(number))
    for nbytes in _SIZES:
        source, target = (
            _Device(nbytes) if kind == "device" else _Host(nbytes, is_readable=kind == "host")
            for _ in range(2)
        )
        if not _arrives(source, target, nbytes):
            sys.stderr.write(f"a message of {nbytes} bytes arrived with wrong bytes\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Send memory to itself by MPI: a program that may end in a segmentation fault or never.

``python mpi_trial.py ORDINAL`` ends with exit status 0 where every byte arrived in memory of that
GPU. It does not import mpishare, nor CuPy, which would compile kernels first.
"""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

#: Libraries move small, middle and large messages in different ways.
_SIZES = (8, 64 << 10, 4 << 20)


class Memory(Protocol):
    address: int

    def fill(self, value: int) -> None: ...
    def read(self) -> Any: ...


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


def arrives(source: Memory, target: Memory, nbytes: int) -> bool:
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


def send_all(memory: Callable[[int], Memory]) -> int:
    """Send every size, in memory of so many bytes, and return the exit status."""
    # A segmentation fault is an expected result: no core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for nbytes in _SIZES:
        if not arrives(memory(nbytes), memory(nbytes), nbytes):
            sys.stderr.write(f"a message of {nbytes} bytes arrived with wrong bytes\n")
            return 1
    return 0


if __name__ == "__main__":
    _use_device(int(sys.argv[1]))
    sys.exit(send_all(_Device))

"""Send memory to itself by MPI: a program that may end in a segmentation fault or never.

``python mpi_trial.py device|host|unreadable ORDINAL`` ends with exit status 0 where every byte
arrived. It imports nothing of mpishare.
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


def _memory(kind: str, nbytes: int, number: int) -> tuple[Any, int]:
    """Return memory and its address."""
    if kind == "device":
        import cupy

        cupy.cuda.Device(number).use()
        array = cupy.zeros(nbytes, "u1")
        return array, int(array.data.ptr)
    host = bytearray(nbytes) if kind == "host" else mmap.mmap(-1, nbytes, prot=_NO_ACCESS)
    array = np.frombuffer(host, "u1")
    return array, int(array.ctypes.data)


def _arrives(memory: str, number: int, nbytes: int) -> bool:
    """Return whether all bytes of a message arrived, by requests that are started twice."""
    from mpi4py import MPI

    sent, source = _memory(memory, nbytes, number)
    received, target = _memory(memory, nbytes, number)
    comm = MPI.COMM_SELF
    requests = [
        comm.Recv_init([MPI.buffer.fromaddress(target, nbytes), MPI.BYTE], 0),
        comm.Send_init([MPI.buffer.fromaddress(source, nbytes), MPI.BYTE], 0),
    ]
    is_right = True
    for value in (0x5A, 0xA5):
        if memory != "unreadable":
            sent[:] = np.uint8(value)
        if memory == "device":
            import cupy

            cupy.cuda.runtime.deviceSynchronize()
        MPI.Prequest.Startall(requests)
        MPI.Request.Waitall(requests)
        is_right &= bool((received == sent).all())
    return is_right


def main(memory: str, number: str) -> int:
    """Send every size and return the exit status."""
    # A segmentation fault is an expected result: no core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    wrong = next((n for n in _SIZES if not _arrives(memory, int(number), n)), None)
    if wrong is not None:
        sys.stderr.write(f"a message of {wrong} bytes arrived with wrong bytes\n")
    return int(wrong is not None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Send memory to oneself by MPI: a program of one rank, which may end in a segmentation fault.

``python trial.py device|host|unreadable ORDINAL``: it imports nothing of mpishare, and ends with
exit status 0 where every word arrived.
"""

from __future__ import annotations

import mmap
import resource
import sys
from typing import Any

import numpy as np
from mpi4py import MPI

#: MPI libraries move small, middle and large messages in different ways.
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


def _send(memory: str, number: int, nbytes: int) -> bool:
    """Return whether all words of a message arrived."""
    sent, source = _memory(memory, nbytes, number)
    received, target = _memory(memory, nbytes, number)
    if memory != "unreadable":
        sent[:] = np.uint8(0x5A)
    if memory == "device":
        import cupy

        cupy.cuda.runtime.deviceSynchronize()
    comm = MPI.COMM_SELF
    requests = [
        comm.Irecv([MPI.buffer.fromaddress(target, nbytes), MPI.BYTE], 0),
        comm.Isend([MPI.buffer.fromaddress(source, nbytes), MPI.BYTE], 0),
    ]
    MPI.Request.Waitall(requests)
    return bool((received == sent).all())


def main() -> int:
    """Send every size and return the exit status."""
    # A segmentation fault is an expected result: no core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for nbytes in _SIZES:
        if not _send(sys.argv[1], int(sys.argv[2]), nbytes):
            sys.stderr.write(f"a message of {nbytes} bytes arrived with wrong words\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The trial of the MPI with memory of the host, or with memory that may not be touched.

``python host_trial.py host|unreadable`` ends as `mpishare.runtime.mpi_trial`, from whose folder it
takes the trial, as that imports nothing of mpishare.
"""

import mmap
import sys
from pathlib import Path

import numpy as np

NO_ACCESS = 0  # PROT_NONE


class Host:
    def __init__(self, nbytes, *, is_readable=True):
        host = bytearray(nbytes) if is_readable else mmap.mmap(-1, nbytes, prot=NO_ACCESS)
        self._is_readable = is_readable
        self._array = np.frombuffer(host, "u1")
        self.address = int(self._array.ctypes.data)

    def fill(self, value):
        if self._is_readable:
            self._array[:] = value

    def read(self):
        return self._array


def unreadable(nbytes):
    return Host(nbytes, is_readable=False)


if __name__ == "__main__":
    # Behind the others: modules beside the trial have names of other packages.
    sys.path.append(str(Path(__file__).parents[2] / "mpishare" / "runtime"))
    from mpi_trial import send_all

    sys.exit(send_all({"host": Host, "unreadable": unreadable}[sys.argv[1]]))

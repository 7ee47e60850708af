"""What this process holds of shared memory, so that a test can tell whether anything was leaked.

Of this process alone: other jobs of the machine use /dev/shm and the GPU too.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.launch import SHM

OURS = (f"{SHM}/#", f"{SHM}/mpishare-")
"""How the kernel calls memory that mpishare made, and memory that it attached to."""


@dataclass(frozen=True)
class Held:
    """Open files, bytes of shared memory that are mapped, and names that mpishare gave."""

    fds: int
    mapped: int
    names: frozenset[str]


def held() -> Held:
    """What is held now. Local."""
    mapped = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(OURS):
            start, end = fields[0].split("-")
            mapped += int(end, 16) - int(start, 16)
    files = [str(f.readlink()) for f in Path("/proc/self/fd").iterdir() if f.is_symlink()]
    if "cupy" in sys.modules:  # the driver opens files of its own when it likes
        files = [file for file in files if file.startswith(OURS)]
    names = frozenset(file.name for file in SHM.glob(f"mpishare-{os.getpid()}-*"))
    return Held(len(files), mapped, names)


def gpu_free() -> int:
    """Bytes that are free on this rank's GPU."""
    import cupy

    return int(cupy.cuda.runtime.memGetInfo()[0])

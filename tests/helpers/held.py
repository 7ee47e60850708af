"""What this process holds of shared memory, so that a test can tell whether anything was leaked.

Of this process alone: other jobs of the machine use /dev/shm and the GPU too.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

SHM = Path("/dev/shm")
OURS = (f"{SHM}/#", f"{SHM}/mpishare-")
"""How the kernel calls memory that mpishare made, and memory that it attached to."""


@dataclass(frozen=True)
class Held:
    """Open files, bytes of shared memory that are mapped, and names that mpishare gave."""

    fds: int
    mapped: int
    names: frozenset[str]


def shared_bytes() -> int:
    """How much of mpishare's shared memory this process maps."""
    maps = Path("/proc/self/maps").read_text()
    ranges = re.findall(r"^(\w+)-(\w+) .* /dev/shm/(?:#|mpishare-)", maps, re.MULTILINE)
    return sum(int(end, 16) - int(start, 16) for start, end in ranges)


def open_files() -> list[str]:
    return [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]


def held() -> Held:
    files = open_files()
    if "/libcuda.so" in Path("/proc/self/maps").read_text():  # which opens files when it likes
        files = [file for file in files if file.startswith(OURS)]
    names = frozenset(file.name for file in SHM.glob(f"mpishare-{os.getpid()}-*"))
    return Held(len(files), shared_bytes(), names)


def gpu_free() -> int:
    import cupy

    return int(cupy.cuda.runtime.memGetInfo()[0])

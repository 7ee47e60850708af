"""Which libraries there are, by the words of ``--against``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpishare.bench.links.link import Library

#: For each word the module and its class.
_PLACES = {
    "mpi": ("cudampi", "CudaMpi"),
    "nccl": ("nccl", "Nccl"),
    "nvshmem": ("nvshmem", "Nvshmem"),
    "torch": ("symmetric", "TorchSymmetric"),
}
#: For each word its arms in the report, and whether each is captured into a graph.
ARMS = {
    "mpi": {"mpi": False},
    "nccl": {"nccl": False, "nccl graph": True},
    "nvshmem": {"nvshmem": False},
    "torch": {"torch": False},
}


def library(word: str) -> type[Library]:
    """Return the class of a library. Local: imports the module, and not the library itself."""
    module, name = _PLACES[word]
    found: type[Library] = getattr(import_module(f"mpishare.bench.links.{module}"), name)
    return found

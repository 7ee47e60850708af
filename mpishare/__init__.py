"""MPI windows for GPU memory, ordered on streams."""

from mpishare.attach import attach
from mpishare.errors import (
    ClosedError,
    CudaError,
    EpochError,
    HandleError,
    MismatchError,
    MpiShareError,
    PeerError,
    PeerTimeout,
    UnsupportedError,
)
from mpishare.event import Event
from mpishare.halo import HaloExchange, NeighborExchange
from mpishare.node import Node
from mpishare.window import Window

__all__ = [
    "ClosedError",
    "CudaError",
    "EpochError",
    "Event",
    "HaloExchange",
    "HandleError",
    "MismatchError",
    "MpiShareError",
    "NeighborExchange",
    "Node",
    "PeerError",
    "PeerTimeout",
    "UnsupportedError",
    "Window",
    "__version__",
    "attach",
]

__version__ = "0.1.0"

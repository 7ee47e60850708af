"""MPI windows for GPU memory, ordered on streams."""

from mpishare.allreduce import Allreduce
from mpishare.channel import Channel
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
from mpishare.graphs.step import capture
from mpishare.halo import HaloExchange, Layout, NeighborExchange
from mpishare.node import Node
from mpishare.pool import Pool
from mpishare.setup.outside import outside_environment
from mpishare.viewers.attached import attach
from mpishare.window import Window

__all__ = [
    "Allreduce",
    "Channel",
    "ClosedError",
    "CudaError",
    "EpochError",
    "Event",
    "HaloExchange",
    "HandleError",
    "Layout",
    "MismatchError",
    "MpiShareError",
    "NeighborExchange",
    "Node",
    "PeerError",
    "PeerTimeout",
    "Pool",
    "UnsupportedError",
    "Window",
    "__version__",
    "attach",
    "capture",
    "outside_environment",
]

__version__ = "0.1.0"

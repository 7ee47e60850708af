"""Ghost cells, sums and particles between the GPUs of MPI ranks, ordered on streams."""

from mpishare import device as device  # for `mpishare.device.include`
from mpishare import seams as seams  # for `mpishare.seams.blocks`
from mpishare.errors import (
    CapacityError,
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
from mpishare.graphs.step import capture
from mpishare.halo import Box, HaloExchange, Layout, NeighborExchange, Seam, SeamExchange
from mpishare.node import Node
from mpishare.redistribution.distribution import OnRank
from mpishare.redistribution.plan import Redistribute
from mpishare.reduction.allreduce import Allreduce
from mpishare.rows.exchange import RowExchange
from mpishare.rows.migration import Migration
from mpishare.runtime import ranges as ranges  # for `mpishare.ranges.enable`
from mpishare.runtime.outside import outside_environment
from mpishare.view.attached import attach
from mpishare.view.opened_pool import open_handle
from mpishare.windows.channel import Channel
from mpishare.windows.event import Event
from mpishare.windows.pool import Pool
from mpishare.windows.window import Window

__all__ = [
    "Allreduce",
    "Box",
    "CapacityError",
    "Channel",
    "ClosedError",
    "CudaError",
    "EpochError",
    "Event",
    "HaloExchange",
    "HandleError",
    "Layout",
    "Migration",
    "MismatchError",
    "MpiShareError",
    "NeighborExchange",
    "Node",
    "OnRank",
    "PeerError",
    "PeerTimeout",
    "Pool",
    "Redistribute",
    "RowExchange",
    "Seam",
    "SeamExchange",
    "UnsupportedError",
    "Window",
    "__version__",
    "attach",
    "capture",
    "open_handle",
    "outside_environment",
]

__version__ = "0.2.0"


def __dir__() -> list[str]:
    """Return the public names, without the modules behind them."""
    return [*__all__, "device", "ranges", "seams"]

"""The ranks of one machine as two nodes, of which each half takes the other for another machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from mpi4py import MPI

import mpishare
from mpishare.backends import nccl
from mpishare.runtime import places

WORLD = MPI.COMM_WORLD
HALF = -(-WORLD.size // 2)


def device_of_half() -> int:
    """A GPU for each rank, or for each half: ranks do not know who uses theirs elsewhere."""
    import cupy

    ngpus = int(cupy.cuda.runtime.getDeviceCount())
    return WORLD.rank if ngpus >= WORLD.size else WORLD.rank // HALF % ngpus


@contextmanager
def node_of_half(device: int | None, backend: str = "cuda") -> Iterator[mpishare.Node]:
    """Yield the node of this rank's half, on a GPU unless told otherwise. Collective.

    To NCCL each rank is a host, so that ranks may share a GPU; its messages go by sockets.
    """
    place = places.place
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "NCCL_HOSTID", f"host{WORLD.rank}")
        patch.setitem(os.environ, "NCCL_SOCKET_IFNAME", "lo")
        with pytest.MonkeyPatch.context() as while_made:
            while_made.setattr(places, "place", lambda: [*place(), WORLD.rank // HALF])
            node = mpishare.Node(WORLD, device=device, backend=backend, timeout_s=30)
        with node:
            yield node


def require_nccl() -> None:
    """Skip a test where NCCL does not load."""
    try:
        nccl.load()
    except mpishare.UnsupportedError as error:
        pytest.skip(str(error))

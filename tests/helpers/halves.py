"""The ranks of one machine as two nodes, of which each half takes the other for another machine."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from mpi4py import MPI

import mpishare
from mpishare.runtime import places

WORLD = MPI.COMM_WORLD
HALF = -(-WORLD.size // 2)


@contextmanager
def node_of_half(device: int) -> Iterator[mpishare.Node]:
    """Yield the node of this rank's half, on a GPU. Collective."""
    place = places.place
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(places, "place", lambda: [*place(), WORLD.rank // HALF])
        node = mpishare.Node(WORLD, device=device, timeout_s=30)
    assert node.backend == "cuda"
    with node:
        yield node

"""Faces of every second plane, on each route of the host: no code but that of boxes knows steps."""

from unittest import mock

import numpy as np
import pytest

import mpishare
from mpishare.plans.exchange.host import parts, process_read
from tests.helpers.stepped import stepped_faces

SHAPE = (9, 8, 7)  # a ghost on either side of the first two axes
TURNS = 5


def cells_of(rank, turn):
    """Owned cells that tell the rank, the turn and their place; ghosts of -1."""
    found = np.full(SHAPE, -1.0)
    own = found[1:-1, 1:-1]
    own[...] = 1e6 * (rank + 1) + 1e4 * turn + np.arange(own.size).reshape(own.shape)
    return found


def expected(rank, size, turn, axis):
    found = cells_of(rank, turn)
    before, after = (cells_of((rank + step) % size, turn) for step in (-1, 1))
    inner = slice(1, -1)
    faces = [
        ((slice(0, 1), inner), (slice(-2, -1), inner), before),
        ((slice(-1, None), inner), (slice(1, 2), inner), after),
        ((inner, slice(0, 1)), (inner, slice(-2, -1)), found.copy()),
        ((inner, slice(-1, None)), (inner, slice(1, 2)), found.copy()),
    ]
    steps = [slice(None)] * 3
    steps[axis] = slice(None, None, 2)
    for ghosts, owned, source in faces:
        found[ghosts][tuple(steps)] = source[owned][tuple(steps)]
    return found


def exchange(node, axis, make=np.empty):
    with stepped_faces(axis):
        halo = mpishare.HaloExchange(
            node.comm, make(SHAPE), 1, dims=(node.size, 1), periods=True, axes=(0, 1), node=node
        )
    with halo:
        for turn in range(TURNS):
            field = make(SHAPE)
            field[...] = cells_of(node.rank, turn)
            halo.exchange(field)
            assert np.array_equal(field, expected(node.rank, node.size, turn, axis))
        return halo.routes, halo


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("name", ["", "MPISHARE_HOST_CODE=python", "MPISHARE_ROUTE=mpi"])
def test_faces_that_are_packed(monkeypatch, axis, name):
    """By C or by NumPy into staging, and into messages."""
    if name:
        monkeypatch.setenv(*name.split("="))
    with mpishare.Node(backend="host", timeout_s=40) as node:
        routes, _ = exchange(node, axis)
    assert ("mpi" in {*routes.values()}) == ("mpi" in name and bool(routes))


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("spread", [1.25, 8.0], ids=["runs", "with gaps"])
@pytest.mark.parametrize("block_nbytes", [64, 1 << 18])
def test_faces_read_where_they_are(compiled_node, axis, spread, block_nbytes):
    """From the process, and within a field some planes at a time."""
    with (
        mock.patch.object(parts, "_MIN_READ_NBYTES", 8),
        mock.patch.object(parts, "_MIN_READ_RUN_NBYTES", 8),
        mock.patch.object(parts, "_MAX_SPREAD", spread),
        mock.patch.object(parts, "_MIN_BLOCKED_NBYTES", 8),
        mock.patch.object(parts, "_CACHE_NBYTES", 1 << 10),
        mock.patch.object(process_read, "_BLOCK_NBYTES", block_nbytes),
    ):
        _, halo = exchange(compiled_node, axis)
        size = compiled_node.size
        assert len(halo._forward._host._peer_reads.keys) == (2 * size if size > 1 else 0)

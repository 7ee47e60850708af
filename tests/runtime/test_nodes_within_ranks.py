"""Nodes of ranks that are in another node already."""

import time

import pytest
from mpi4py import MPI

from mpishare import Node
from mpishare.runtime import create
from tests.helpers.windows import check_works

TWO = pytest.mark.ranks(min=2)


@pytest.fixture
def row(comm):
    """Every second rank, in reverse order."""
    row = comm.Split(comm.rank % 2, -comm.rank)
    yield row
    row.Free()


def named(node):
    return [(each.given_rank, each.host, each.pid, each.device) for each in node.report().members]


def test_nothing_is_asked_anew(host_node, comm, row, monkeypatch):
    """The node is the same as one with a survey of its own."""
    with monkeypatch.context() as patch:
        patch.setattr(create, "surveyed", lambda _: {})
        alone = Node(row, backend="host")
    for name in ("_find_node", "remove_abandoned", "why_unreadable"):
        monkeypatch.setattr(create, name, lambda *_, name=name: pytest.fail(f"{name} is called"))
    within = Node(row, backend="host")
    assert within.ranks == alone.ranks
    assert MPI.Comm.Compare(within.comm, row) == MPI.CONGRUENT
    assert named(within) == named(alone)
    mine, theirs = within.report(), alone.report()
    for part in ("pairs", "notes", "native_missing", "unreadable"):
        assert getattr(mine, part) == getattr(theirs, part)
    check_works(within)
    alone.close()
    check_works(within)
    within.close()


@pytest.mark.ranks(min=3)
def test_a_late_rank_is_none_of_a_node_of_a_small_cart(host_node, comm):
    """MPICH's group of that node has ranks that the node has not."""
    cart = comm.Create_cart([comm.size - 1])
    node = None if cart == MPI.COMM_NULL else Node(cart)
    turned = comm.Split(0, -comm.rank)
    if comm.rank == 0:
        time.sleep(0.3)
    with Node(turned) as other:
        check_works(other)
    if node is not None:
        node.close()
        cart.Free()
    turned.Free()

"""Nodes of ranks that are in another node already, and nodes that nobody holds any more."""

import gc
import time
from dataclasses import replace

import numpy as np
import pytest
from mpi4py import MPI

import mpishare
from mpishare import Node
from mpishare.runtime import create, surroundings
from mpishare.runtime.open_nodes import open_nodes
from mpishare.runtime.surroundings import Survey
from tests.helpers.held import held

TWO = pytest.mark.ranks(min=2)


@pytest.fixture
def row(comm):
    """Every second rank, in reverse order."""
    row = comm.Split(comm.rank % 2, -comm.rank)
    yield row
    row.Free()


def check_works(node):
    window = node.allocate_each(2, fill=float(node.rank))
    window.fence()
    other = (node.rank + 1) % node.size
    assert window.segment(other).tolist() == [other] * 2
    window.fence()
    window.close()


def named(node):
    return [(each.given_rank, each.host, each.pid, each.device) for each in node.report().members]


# --- within another node


def test_nothing_is_asked_anew(host_node, comm, row, monkeypatch):
    """The node is the same as one with a survey of its own."""
    with monkeypatch.context() as patch:
        patch.setattr(create.open_nodes, "surveyed", lambda _: {})
        alone = Node(row, backend="host")
    for owner, name in (
        (create, "_find_node"),
        (create, "remove_abandoned"),
        (Survey, "describe"),
        (Survey, "read"),
        (surroundings, "namespaces"),
    ):
        monkeypatch.setattr(owner, name, lambda *_, name=name: pytest.fail(f"{name} is called"))
    within = Node(row, backend="host")
    assert within.ranks == alone.ranks
    assert MPI.Comm.Compare(within.comm, row) == MPI.CONGRUENT
    assert named(within) == named(alone)
    mine, theirs = within.report(), alone.report()
    for part in ("pairs", "notes", "native_missing"):
        assert getattr(mine, part) == getattr(theirs, part)
    room = {"shm_left": 0, "memory_left": None}
    assert replace(mine.surroundings, **room) == replace(theirs.surroundings, **room)
    assert within._context.name not in (alone._context.name, host_node._context.name)
    check_works(within)
    alone.close()
    check_works(within)
    within.close()


def test_it_outlives_the_node_of_the_survey(comm, row):
    outer = Node(comm)
    within = Node(row)
    assert within._context.findings.name in open_nodes.surveyed(within._context.findings.place)
    outer.close()
    check_works(within)
    within.close()


def test_a_node_that_is_broken_on_one_rank_is_not_believed(comm):
    outer = Node(comm, backend="host")
    if comm.rank == 0:
        outer._context.agreement.leave("a test", ValueError("of this rank"))
    again = Node(comm, backend="host")
    assert again._context.findings.name != outer._context.name
    check_works(again)
    again.close()
    outer.__exit__(ValueError, ValueError(), None)


# --- that nobody holds any more


def make(comm, u):
    """A node, and objects of all kinds that hold it."""
    node = Node(comm, backend="host")
    total = mpishare.Allreduce(node.comm, u, node=node)
    total.reduce(u)
    halo = mpishare.HaloExchange(comm, u, 1, dims=(comm.size, 1), node=node)
    halo.exchange(u)
    return node, total, halo, node.allocate(3), node.event()


def is_open(name):
    return name in [each._context.name for each in open_nodes.registered()]


def test_dropped_nodes_keep_nothing(host_node, row):
    """Neither descriptors nor maps, however many there were."""
    u, counts = np.ones((4, 3)), []
    for _ in range(12):
        made = make(row, u)
        name = made[0]._context.name
        del made
        gc.collect()
        now = held()
        counts.append((now.fds, now.mapped, len(open_nodes.registered())))
    assert len({*counts[2:]}) == 1
    assert is_open(name)  # whoever drops it does not wait for the others
    host_node.collect()
    assert not is_open(name)


@pytest.mark.parametrize("what", ["node", "comm", "window", "array", "plan", "step"])
def test_it_stays_while_a_rank_holds_a_part(host_node, row, what):
    made = make(row, np.ones((4, 3)))
    node, _, plan, window = made[:4]
    name = node._context.name
    step = mpishare.capture(node, int)
    parts = {"node": node, "comm": node.comm, "window": window, "array": window.array}
    parts |= {"plan": plan, "step": step}
    kept = parts[what] if row.rank == 0 else None
    del made, node, _, plan, window, step, parts
    host_node.collect()
    assert is_open(name)
    Node(row, backend="host").close()
    assert is_open(name)
    if kept is not None and what == "plan":
        assert not kept.is_closed
    kept = None
    host_node.collect()
    assert not is_open(name)


def test_collect_closes_dropped_objects(host_node):
    before = len(host_node._context.children)
    host_node.allocate(3)
    assert len(host_node._context.children) == before + 1
    host_node.collect()
    assert len(host_node._context.children) == before


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

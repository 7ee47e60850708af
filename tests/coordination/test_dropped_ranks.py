"""Objects that nobody holds any more: closed at the next collective call, once all dropped them."""

import contextlib
import functools
import gc
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mpishare
from mpishare.plans.node_cache import context_of
from tests.helpers import rings
from tests.helpers.held import held
from tests.helpers.rings import beside

TWO = pytest.mark.ranks(min=2)
ring = functools.partial(rings.ring, axes=(0,))
MADE = ("window", "each", "event", "channel", "pool", "halo", "neighbors", "allreduce")


def open_objects(node):
    return [child.name for child in context_of(node).children]


def make(node, what):
    field = node.xp.zeros((4, 3))
    left, right = beside(node)
    return {
        "window": lambda: node.allocate(3),
        "each": lambda: node.allocate_each(3),
        "event": node.event,
        "channel": lambda: node.channel(3),
        "pool": node.pool,
        "halo": lambda: ring(node, field),
        "neighbors": lambda: mpishare.NeighborExchange(
            node.comm, {right: [1]}, {left: [0]}, field, node=node
        ),
        "allreduce": lambda: mpishare.Allreduce(node.comm, field, node=node),
    }[what]()


def rotated(node, halo, u):
    """Whether an exchange brings the neighbors' numbers."""
    u[...] = node.rank
    halo.exchange(u)
    node.synchronize()
    left, right = beside(node)
    return float(u[0].max()) == left and float(u[-1].min()) == right


@pytest.mark.parametrize("what", MADE)
def test_it_stays_until_the_last_rank_has_dropped_it(node, what):
    """Who drops it does not wait for the others."""
    before, made = open_objects(node), [make(node, what)]
    name = made[0].name
    for rank in range(node.size):
        node.collect()
        assert name in open_objects(node)
        if node.rank == rank:
            assert not made[0].is_closed
            del made[0]
            assert name in open_objects(node)
    node.collect()
    assert open_objects(node) == before


def test_any_collective_call_of_the_node_will_do(node):
    calls = {what: functools.partial(make, node, what) for what in MADE}
    calls |= {"share": lambda: node.share([1]), "share_each": lambda: node.share_each([1])}
    calls["collect"] = node.collect
    for name, call in calls.items():
        dropped = node.allocate(3).name
        made = call()
        assert dropped not in open_objects(node), name
        del made


def array_of(node, made):
    if isinstance(made, mpishare.Window):
        return made.array
    return made.allocate(3) if node.is_leader else node.xp.zeros(3)  # which keeps nothing


@pytest.mark.parametrize("what", ["each", "pool"])
def test_an_array_keeps_what_it_is_of(node, what):
    made = make(node, what)
    name = made.name
    array = array_of(node, made)
    array[...] = node.rank
    del made
    node.collect()
    assert name in open_objects(node)
    part = array[1:]
    del array
    node.collect()
    assert name in open_objects(node)
    assert part.tolist() == [node.rank] * 2
    del part
    node.collect()
    assert name not in open_objects(node)


def test_a_block_keeps_its_channel(node):
    channel = node.channel(3)
    name = channel.name
    with channel.put() if node.is_leader else contextlib.nullcontext() as slot:
        del channel
        node.collect()
        assert name in open_objects(node)
        if node.is_leader:
            slot[...] = 1
            del slot
    node.collect()
    assert name not in open_objects(node)


def test_dropped_in_another_thread_or_in_a_cycle(node):
    made = [node.allocate(3), ring(node, node.xp.zeros((4, 3)))]
    names = {each.name for each in made}
    thread = threading.Thread(target=made.clear)
    thread.start()
    thread.join()
    node.collect()
    assert not names & set(open_objects(node))
    channel = node.channel(3)
    channel.itself, name = channel, channel.name
    del channel
    node.collect()
    gc.collect()
    assert name in open_objects(node)  # though no weak reference leads there any more
    node.collect()
    assert name not in open_objects(node)


@pytest.mark.gpu
def test_nothing_is_closed_in_a_capture(node):
    """To close waits for all streams, which would end the capture."""
    stream, x = node.xp.cuda.Stream(non_blocking=True), node.xp.zeros(4)
    halo = ring(node, node.xp.zeros((4, 3)))
    name = halo.name
    x += 1  # its kernel is loaded
    node.synchronize()
    with stream:
        stream.begin_capture()
        x += 1
        del halo
        node.collect()
        graph = stream.end_capture()
        assert name in open_objects(node)
        graph.launch()
        node.synchronize()
    assert x.tolist() == [2] * 4
    node.collect()
    assert name not in open_objects(node)


@TWO
def test_a_plan_of_some_ranks_is_closed_by_their_next_plan(node):
    """Whatever the others do meanwhile; the names agree on all ranks of a plan."""
    comm = node.comm.Split(0 if node.rank < 2 else 1, -node.rank)
    field = node.xp.zeros((4, 3))
    names = []
    for _ in range(1 + comm.size):
        plan = ring(node, field, comm=comm)
        assert comm.allgather(plan.name) == [plan.name] * comm.size
        names.append(plan.name)
        del plan
    assert set(names) & set(open_objects(node)) == {names[-1]}
    whole = ring(node, field)
    assert node.comm.allgather(whole.name) == [whole.name] * node.size
    assert rotated(node, whole, field)
    comm.Free()


@pytest.mark.parametrize("is_given", [True, False], ids=["node given", "node kept"])
def test_carts_of_their_own(node, is_given):
    """Plans are made, used and dropped on carts that are freed: nothing grows."""
    u, counts, pages = node.xp.zeros((4, 3)), [], []
    n_plans = 400 if node.size <= 2 and is_given else 150
    for number in range(n_plans):
        cart = MPI.COMM_WORLD.Create_cart((node.size,), periods=(True,))
        halo = mpishare.HaloExchange(cart, u, 1, axes=(0,), node=node if is_given else None)
        assert rotated(node, halo, u)
        del halo
        cart.Free()
        if number in (99, n_plans - 1):
            node.collect()
            now = held()
            counts.append((now.fds, now.mapped, len(open_objects(node))))
            pages.append(int(Path("/proc/self/statm").read_text().split()[1]))
    assert counts[0] == counts[1]
    assert pages[1] - pages[0] < 256  # of 300 plans one each would be more


@TWO
def test_messages_of_two_plans_do_not_meet(node, monkeypatch):
    """They go over one communicator, whatever the nodes, and the order of the waits."""
    monkeypatch.setenv("MPISHARE_ROUTE", "mpi")
    fields = [node.xp.zeros((4, 3)) for _ in range(3)]
    nodes = node, node, None
    plans = [ring(node, u, node=each) for u, each in zip(fields, nodes, strict=True)]
    left = (node.rank - 1) % node.size
    for step in range(6):
        # Only the calls of one node are in the same order on all ranks.
        for number in (0, 1, 2) if node.rank % 2 else (2, 0, 1):
            fields[number][...] = node.rank + 100 * number + 1000 * step
            plans[number].start(fields[number])
        for number in np.random.default_rng(step).permutation(3):
            plans[number].wait()
        node.synchronize()
        found = [float(u[0, 0]) - 1000 * step for u in fields]
        assert found == [left, left + 100, left + 200]
    for plan in plans:
        plan.close()


def test_out_of_communicators(node):
    """The error says how many plans are open; MPICH has about 2,000 communicators."""
    if "MPICH" not in MPI.Get_library_version():
        pytest.skip("only MPICH has so few")
    text = r"(?s)has \d+ plans open .*cart.Free\(\)"
    plans = [ring(node, np.zeros((4, 3)), node=None) for _ in range(3)]
    comm, taken = MPI.COMM_SELF.Dup(), []
    reverse = MPI.COMM_WORLD.Split(0, -node.rank)
    try:
        try:
            while True:
                taken.append(MPI.COMM_SELF.Dup())  # local, and of the same numbers
        except MPI.Exception:
            pass
        assert len(taken) > 1000
        if node.size > 1:
            with pytest.raises(mpishare.MpiShareError, match=text):
                ring(node, np.zeros((4, 3)), comm=reverse, node=None)
        with pytest.raises(mpishare.MpiShareError, match=text):
            mpishare.Node()
        another = ring(node, np.zeros((4, 3)), node=None)  # the same ranks need no other
        another.close()
    finally:
        for each in [*taken, comm, reverse]:
            each.Free()
    for plan in plans:
        plan.close()


@pytest.mark.parametrize("is_given", [True, False])
def test_the_error_of_a_plan_holds_no_array(host_node, is_given):
    """Nor does a cycle with its traceback, until Python collects cycles."""

    class Array(np.ndarray):
        pass

    given = {"node": host_node} if is_given else {}
    field = np.zeros(1000).view(Array)
    seen = weakref.ref(field)
    gc.collect()
    gc.disable()
    try:
        op = "none" if host_node.rank == 0 else "sum"
        with pytest.raises((ValueError, mpishare.PeerError)):
            mpishare.Allreduce(host_node.comm, field, op, **given)
        del field
        assert seen() is None
    finally:
        gc.enable()

"""Plans over several nodes, as the launcher of MPICH pretends them: routes host and mpi mixed."""

import contextlib

import numpy as np
import pytest

import mpishare
from tests.halo.test_death_faults import late
from tests.helpers.reporting import report
from tests.helpers.scenes import LIMIT_S
from tests.helpers.scenes_halo import MACHINES, NODES, play_on
from tests.helpers.stage import Stage


def random_plans(stage: Stage, seeds: int) -> None:
    from tests.helpers.halos import random_plan

    with stage.node() as node:
        of_node = stage.gather((stage.rank, node.ranks[0]))
        mates = {rank for rank, first in of_node if first == node.ranks[0]}
        seen = set()
        for seed in range(seeds):
            routes = random_plan(node, stage.world, seed)
            right = {rank: "host" if rank in mates else "mpi" for rank in routes}
            assert routes == right, f"seed {seed}: {routes}, not {right}"
            seen |= set(routes.values())
    assert {"host", "mpi"} <= seen  # a rank that is its own neighbor, if none else


@pytest.mark.parametrize("nodes", [*NODES, "3 + 3", *MACHINES])
def test_random_plans(nodes):
    """Every ghost, as in the tests of one node; and which route leads where."""
    play_on(nodes, random_plans, 12, shared=True).ended_well()


def random_seams(stage: Stage, seeds: int) -> None:
    from tests.helpers.seams import check_list

    seen = set()
    with stage.node() as node:
        for seed in range(seeds):
            # Of whole numbers: sums of other nodes come behind those of one's own.
            seen |= {*check_list(node, stage.world, seed, ("i4", "c16", "i8")).values()}
    assert {"host", "mpi"} <= seen


@pytest.mark.parametrize("nodes", ["2 + 2", "2 + 1 + 1"])
def test_random_seams(nodes):
    play_on(nodes, random_seams, 12, shared=True).ended_well()


def reverse_and_meshes(stage: Stage) -> None:
    """Sums of ghosts, graphs, a ring by global ids, and one by dims= for fields to come."""
    from tests.helpers.halos import random_sums
    from tests.helpers.meshes import random_exchange

    n, rank = stage.size, stage.rank
    of_ids = mpishare.NeighborExchange.from_global_ids
    with stage.node() as node:
        for seed in range(20):
            random_sums(node, stage.world, seed, gives_back=seed % 2 == 1)
            random_exchange(node, stage.world, seed)
        layout = mpishare.Layout(4)
        right = np.array([2 * rank - 1, 2 * rank, 2 * rank + 1, 2 * rank + 2]) % (2 * n)
        ids = right[[1, 2, 0, 3]]
        ex = of_ids(stage.world, ids, 2, layout, node=node)
        halo = stage.ring(node, layout, dims=(0,))
        for plan, found in ((ex, ids), (halo, right)):
            field = np.where(found // 2 == rank, found, -1).astype(float)
            plan.exchange(field)
            assert np.array_equal(field, found), f"{plan}: {field}"
        assert "mpi" in {*ex.routes.values(), *halo.routes.values()}


@pytest.mark.parametrize("nodes", ["2 + 2", "2 + 1 + 1"])
def test_the_reverse_and_meshes(nodes):
    play_on(nodes, reverse_and_meshes, shared=True).ended_well()


def sent_before(stage: Stage) -> None:
    """Who waits in a barrier of the node has sent what the other rank there waits for."""
    with stage.node() as node:
        large = np.zeros(40_000_000, "u1")
        if stage.rank == 0:
            request = stage.world.Isend(large, 2)
            node.barrier()
            request.Wait()
        elif stage.rank == 1:
            stage.world.recv(source=2)
            node.barrier()
        else:
            stage.world.Recv(large, 0)
            stage.world.send("it has come", 1)


@pytest.mark.parametrize("nodes", ["2 + 1", "2 + 1 machines"])
def test_messages_go_on_while_a_rank_waits(nodes):
    play_on(nodes, sent_before, shared=True).ended_well()


def refused(stage: Stage) -> None:
    cart = stage.world.Create_cart((stage.size,), (True,))
    with stage.node() as node:
        make = mpishare.HaloExchange
        stage.attempt("host only", make, cart, np.zeros(6), 1, node=node, require="host")
        # Rank 0 asks rank 3, of the other node, for more cells than it has.
        width = (3 * (stage.rank == 0), 0)
        fields = np.zeros((2 if stage.rank == 3 else 6) + width[0])
        stage.attempt("too wide", make, cart, fields, width, node=node)
        stage.attempt("bad", make, cart, np.zeros(6), 1 - 2 * (stage.rank == 3), node=node)
        dtype = "f4" if stage.rank == 3 else "f8"
        stage.attempt("dtype", make, cart, np.zeros(6, dtype), 1, node=node)
        halo = stage.attempt("good", make, cart, np.zeros(6), 1, node=node, require=("host", "mpi"))
        halo.exchange(np.zeros(6))
        report({"routes": sorted(halo.routes.items())})
        halo.close()
    cart.Free()


def test_errors_cross_nodes():
    played = play_on("2 + 2", refused, shared=True)
    (text,) = {played.raised(rank, "too wide", "ValueError").text for rank in range(4)}
    assert "rank 0" in text
    assert "rank 3" in text
    for rank in range(4):
        assert "mpi" in played.raised(rank, "host only", "UnsupportedError").text
        bad = played.raised(rank, "bad", "ValueError" if rank == 3 else "PeerError")
        assert rank == 3 or list(bad.failures) == [3]
        assert "float32" in played.raised(rank, "dtype", "MismatchError").text
        played.worked([rank], "good")
    assert dict(played.rank(0)["routes"]) == {1: "host", 3: "mpi"}
    assert dict(played.rank(2)["routes"]) == {1: "mpi", 3: "host"}


def test_a_rank_of_another_node_that_does_not_come():
    """Named within the deadline; the plan and the node are broken then."""
    played = play_on("1 + 1", late, "exchange", 1, shared=True)
    told = played.raised(0, "call", "PeerTimeout")
    assert "rank 1" in told.text
    assert 2 <= told.seconds < 2 + LIMIT_S
    assert played.raised(0, "then", "PeerTimeout").seconds < 2
    played.worked([0], "close")


def test_a_rank_of_another_node_that_does_not_come_to_a_step():
    """Messages know no rank, and none of this node is missing: that is the whole text."""
    played = play_on("2 + 1", late, "close of a halo", 2, shared=True)
    errors = set()
    for rank in (0, 1):
        for told in (played.told(rank, call) for call in ("call", "then")):
            assert "close failed: not every rank of the communicator arrived" in told.text
            errors.add(told.error)
    assert errors <= {"PeerTimeout", "PeerError"}  # the latter where the other gave up first


def on_nodes_of_several_ages(stage: Stage) -> None:
    """Rank 0 keeps the node that it made alone, rank 1 makes another for each plan."""
    from mpi4py import MPI

    from mpishare.plans import comm

    comm.place = lambda: [str(stage.rank)]  # of two machines
    first = mpishare.Node(MPI.COMM_SELF, timeout_s=5)
    for _ in range(3):
        node = mpishare.Node(MPI.COMM_SELF, timeout_s=5) if stage.rank else first
        u = np.full(4, float(stage.rank))
        with stage.ring(node, u) as halo:
            halo.exchange(u)
        assert u[0] == u[-1] == 1 - stage.rank
        with stage.ring(node, mpishare.Layout(4, None)) as halo:
            for field in (u, u.astype("f4")):
                halo.exchange(field)


def test_a_plan_on_an_older_and_a_newer_node():
    play_on("1 + 1", on_nodes_of_several_ages, shared=True).ended_well()


def after_an_interrupt(stage: Stage) -> None:
    """Only the ranks of the interrupted one's node hear of it, before the next plan."""
    from mpishare.plans import node_cache

    node_cache._DEFAULT_TIMEOUT_S = 5
    u = np.full(4, float(stage.rank))
    halo = stage.ring(None, u)
    halo.exchange(u)
    if stage.rank == 0:
        with contextlib.suppress(KeyboardInterrupt), halo:
            raise KeyboardInterrupt
    stage.world.Barrier()
    u[:] = stage.rank
    with stage.ring(None, u) as another:
        another.exchange(u)
    assert (u[0], u[-1]) == ((stage.rank - 1) % stage.size, (stage.rank + 1) % stage.size)


@pytest.mark.parametrize("nodes", ["1 + 1", "2 + 1"])
def test_the_next_plan_after_an_interrupt_on_one_node(nodes):
    play_on(nodes, after_an_interrupt, shared=True).ended()

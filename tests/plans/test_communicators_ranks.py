"""Plans and windows on every kind of communicator, and then on that of all ranks.

Communicators that are called small have fewer ranks than the one of which MPI made them; the others
have `COMM_NULL`. MPICH 5.0.2 has the wrong groups for some of them (docs/mpi-faults.md).
"""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from mpi4py import MPI

import mpishare
from mpishare.coordination.mpi_agreement import CommWatch, identify, known
from mpishare.errors import PeerTimeout
from tests.helpers.rings import ring
from tests.helpers.windows import check_works

pytestmark = pytest.mark.ranks(min=2)

Derive = Callable[[MPI.Intracomm], MPI.Intracomm]


def small_cart(comm: MPI.Intracomm) -> MPI.Intracomm:
    return comm.Create_cart([max(1, comm.size - 1)], [True])


def small_graph(comm: MPI.Intracomm) -> MPI.Intracomm:
    count = max(1, comm.size - 1)
    return comm.Create_graph([*range(1, count + 1)], [(each + 1) % count for each in range(count)])


def halves(comm: MPI.Intracomm) -> MPI.Intracomm:
    return comm.Split(comm.rank % 2, comm.rank)


def same_cart(comm: MPI.Intracomm) -> MPI.Intracomm:
    return comm.Create_cart([comm.size], [True])


def group_turned(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return the ranks in the reverse order, made of their group, which must be right."""
    whole = comm.Split(0, comm.rank)
    group = whole.Get_group()
    made = whole.Create_group(group.Incl([*range(whole.size)][::-1]))
    group.Free()
    whole.Free()
    return made


COMMS: dict[str, list[Derive]] = {
    "duplicate": [MPI.Comm.Dup],
    "turned group": [group_turned],
    "halves": [halves],
    "cart": [same_cart],
    "small cart": [small_cart],
    "duplicate of a small cart": [small_cart, MPI.Comm.Dup],
    "turned group of a small cart": [small_cart, group_turned],
    "halves of a small cart": [small_cart, halves],
    "small graph": [small_graph],
}
"""By name, the steps in which each is made."""


@contextlib.contextmanager
def derived(comm: MPI.Intracomm, name: str) -> Iterator[MPI.Intracomm | None]:
    """Yield a communicator of `COMMS`, None on ranks that it does not have. Collective."""
    made = [comm]
    for derive in COMMS[name]:
        if made[-1] != MPI.COMM_NULL:
            made.append(derive(made[-1]))
    yield None if made[-1] == MPI.COMM_NULL else made[-1]
    for each in made[1:]:
        if each != MPI.COMM_NULL:
            each.Free()


every_comm = pytest.mark.parametrize("name", COMMS)


def as_list(array):
    return [float(each) for each in array.ravel()]


def total(node, comm, given):
    x = node.xp.full(2, comm.rank + 1.0)
    with mpishare.Allreduce(comm, x, node=given) as plan:
        plan.reduce(x)
        node.synchronize()
    return as_list(x) == [comm.size * (comm.size + 1) / 2] * 2


def ghosts(node, comm, given):
    u = node.xp.full(4, float(comm.rank))
    own = {"dims": None, "periods": None} if isinstance(comm, MPI.Cartcomm) else {}
    with ring(node, u, comm=comm, node=given, **own) as plan:
        plan.exchange(u)
        node.synchronize()
    rank, size = comm.rank, comm.size
    return as_list(u) == [(rank - 1) % size, rank, rank, (rank + 1) % size]


def neighbors(node, comm, given):
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    u = node.xp.full(2, float(comm.rank))
    with mpishare.NeighborExchange(comm, {right: [1]}, {left: [0]}, u, node=given) as plan:
        plan.exchange(u)
        node.synchronize()
    return as_list(u) == [left, comm.rank]


def columns(node, comm, given):
    whole = np.arange(6.0 * comm.size**2).reshape(2 * comm.size, 3 * comm.size)
    with mpishare.Redistribute(comm, whole.shape, source=0, target=1, node=given) as plan:
        found = plan.forward(node.xp.asarray(whole[plan.source_box.slices]))
        node.synchronize()
    return as_list(found) == [*whole[plan.target_box.slices].ravel()]


PLANS = (total, ghosts, neighbors, columns)


def wrong_plans(node, comm, given):
    """The plans that give wrong numbers there."""
    return [each.__name__ for each in PLANS if not each(node, comm, given)]


@every_comm
@pytest.mark.parametrize("is_given", [True, False], ids=["node given", "node kept"])
def test_plans_of_some_ranks_and_then_of_all(node, name, is_given):
    """Nothing that was made for the ones, and is there still, is taken for the others."""
    given = node if is_given else None
    with derived(node.comm, name) as comm:
        if comm is not None:
            x = node.xp.zeros(1)
            open_yet = mpishare.Allreduce(comm, x, node=given)
            assert wrong_plans(node, comm, given) == []
        assert wrong_plans(node, node.comm, given) == []
        if comm is not None:
            open_yet.close()


@pytest.mark.parametrize(
    "name",
    ["small cart", "duplicate of a small cart", "turned group of a small cart", "small graph"],
)
def test_nodes_of_some_ranks_and_then_of_all(node, name):
    """Each of them has the ranks of its communicator in their order, and serves their plans."""
    with derived(node.comm, name) as some:
        for comm in (some, node.comm):
            if comm is not None:
                with mpishare.Node(comm, timeout_s=40) as made:
                    assert (made.rank, made.size) == (comm.rank, comm.size)
                    check_works(made)
                    assert wrong_plans(made, comm, made) == []
                    assert wrong_plans(made, comm, None) == []
        assert wrong_plans(node, node.comm, node) == []


@every_comm
def test_ranks_are_known_by_what_they_say(comm, name):
    (mine,) = identify(MPI.COMM_SELF, CommWatch("test", 40))
    with derived(comm, name) as some:
        if some is not None:
            assert known(some) == {}
            told = identify(some, CommWatch("test", 40))
            assert [*told] == some.allgather(mine)
            assert [*told.values()] == [*range(some.size)]


def test_a_second_introduction_waits_for_the_messages_of_the_first(comm):
    """Rank 0 gives up while the others are missing, and leaves the communicator usable."""
    of = comm.Dup()
    if comm.rank == 0:
        with pytest.raises(PeerTimeout):
            identify(of, CommWatch("test", 0.1))
    comm.Barrier()
    assert len(identify(of, CommWatch("test", 40))) == comm.size
    with mpishare.Node(of, timeout_s=40) as node:
        assert wrong_plans(node, of, node) == []
    of.Free()

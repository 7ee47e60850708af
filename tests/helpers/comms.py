"""The communicators that tests try: each is made of one that has all ranks, which it may not have.

Those that are called small have fewer ranks than the communicator of which MPI made them, and the
others have `COMM_NULL`. MPICH 5.0.2 has the wrong groups for some of them (docs/mpi-faults.md).
"""

import contextlib
from collections.abc import Callable, Iterator

from mpi4py import MPI

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

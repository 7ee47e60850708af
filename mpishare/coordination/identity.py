"""The processes that are the ranks of a communicator: each sends its id once, and MPI keeps them.

A communicator's group does not have them. That of a cart or graph with fewer ranks than the
communicator it was made of is, in MPICH 5.0.2, the group of that communicator, and so are the
groups of what is made of it in turn (docs/mpi-faults.md).
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

Ranks = dict[int, int]
"""The numbers of a communicator's ranks, by the process and in their order."""

# World ranks would not do: processes that were spawned have a world of their own.
_NBYTES = 8
_MINE = os.urandom(_NBYTES)


@cache
def _key() -> int:
    """Return the attribute of communicators that holds their `Introduction`.

    It goes with the communicator. No duplicate has it by itself: Open MPI 5.0.11 copies attributes
    to what `Create_group` makes, too, which has other ranks.
    """
    from mpi4py import MPI

    return MPI.Comm.Create_keyval()


class Introduction:
    """The one all-gather of a communicator in which its ranks send their ids.

    These never change. So a call that ended while ranks were missing leaves it to the next call on
    the communicator, which goes on waiting for the same messages.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._rows = bytearray(_NBYTES * comm.size)
        self.request = comm.Iallgather(_MINE, self._rows)
        self.ranks: Ranks = {}

    @classmethod
    def of(cls, comm: MPI.Intracomm) -> Introduction:
        """Return that of a communicator; begin it if there is none."""
        found = comm.Get_attr(_key())
        if not isinstance(found, Introduction):
            found = cls(comm)
            comm.Set_attr(_key(), found)
        return found

    def end(self) -> None:
        """Read the ids, once the request is complete."""
        self.ranks = {each: rank for rank, each in enumerate(memoryview(self._rows).cast("q"))}


def known(comm: MPI.Comm) -> Ranks:
    """Return the ranks of a communicator, none while they have not introduced themselves. Local."""
    found = comm.Get_attr(_key())
    return found.ranks if isinstance(found, Introduction) else {}


def pass_on(comm: MPI.Intracomm, duplicate: MPI.Intracomm) -> None:
    """Let the ranks of a duplicate be known by those of its communicator."""
    duplicate.Set_attr(_key(), comm.Get_attr(_key()))

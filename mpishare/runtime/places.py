"""The ranks that share host memory, by MPI and by each rank's /dev/shm.

Neither is enough alone. Launchers were seen to call ranks shared that are not (containers, machines
of one name), and the other way round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mpishare.errors import grouped, name_ranks
from mpishare.memory.shared import place as place

if TYPE_CHECKING:
    from collections.abc import Sequence


class Place(NamedTuple):
    """The machine and container of a rank of the given communicator."""

    group: int  # the lowest rank that shares memory with it, by MPI
    boot: str  # the running kernel; empty without a /dev/shm
    folder: tuple[int, ...]  # device and inode of its /dev/shm; its own rank without one


def here(group: int, rank: int) -> Place:
    """Return the place of this rank.

    A rank without shared memory is alone; where its node is made, an error reports that there is
    none.
    """
    boot, *folder = place() or ("", rank)
    return Place(group, boot, tuple(folder))


def mates_of(rank: int, places: Sequence[Place]) -> list[int]:
    """Return the ranks that share memory with one of them, itself included."""
    return [other for other, each in enumerate(places) if each == places[rank]]


def oddities(rank: int, places: Sequence[Place]) -> list[str]:
    """Describe disagreements of MPI and /dev/shm on the ranks that share memory with this one."""
    found = grouped((_oddity(places[rank], each), other) for other, each in enumerate(places))
    mate = f"rank {mates_of(rank, places)[0]}"
    return [
        text.format(ranks=name_ranks(found[oddity]), mate=mate)
        for oddity, text in _ODDITIES.items()
        if oddity in found
    ]


def _oddity(mine: Place, other: Place) -> str:
    """Return the disagreement on one rank, a key of `_ODDITIES`; empty if there is none."""
    if not mine.boot or not other.boot:
        return ""
    is_mate_by_mpi = other.group == mine.group
    if other.boot != mine.boot:
        return "kernel" if is_mate_by_mpi else ""
    if other.folder != mine.folder:
        return "folder"
    return "" if is_mate_by_mpi else "group"


_ODDITIES = {
    "kernel": (
        "MPI says that {ranks} of the given communicator share memory with {mate}, but they run "
        "under another kernel: machines of one host name? They are nodes of their own"
    ),
    "folder": (
        "the machine of {mate} also runs {ranks} of the given communicator, with another /dev/shm: "
        "another node. To make one node of them start the containers with --ipc=host"
    ),
    "group": (
        "{ranks} of the given communicator have the same /dev/shm as {mate}, but MPI says that "
        "they are on another node, and MPI is believed: with SLURM and PMIx, NodeName must be the "
        "host's name"
    ),
}

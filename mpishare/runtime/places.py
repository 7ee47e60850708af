"""The ranks that share host memory, by MPI and by each rank's /dev/shm.

Neither is enough alone. Launchers were seen to call ranks shared that are not (containers, machines
of one name), and the other way round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mpishare.errors import name_ranks
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


def elsewhere(rank: int, places: Sequence[Place]) -> list[str]:
    """Name the ranks of this one's machine that are a node of their own, and the remedy."""
    mine, mate = places[rank], mates_of(rank, places)[0]
    beside = [r for r, each in enumerate(places) if each.boot and each.boot == mine.boot]
    apart = [r for r in beside if places[r].folder != mine.folder]
    if not apart:
        return []
    return [
        f"the machine of rank {mate} also runs {name_ranks(apart)} of the given communicator, with "
        "another /dev/shm: another node. To make one node of them start the containers with "
        "--ipc=host"
    ]

"""The ranks that share host memory, by MPI and by each rank's /dev/shm.

Neither is enough alone. Launchers were seen to call ranks shared that are not (containers, machines
of one name), and the other way round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mpishare.errors import name_ranks
from mpishare.memory.shared import place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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
    mine = places[rank]
    mates = mates_of(rank, places)

    def others(is_meant: Callable[[Place], bool]) -> list[int]:
        known = [other for other, each in enumerate(places) if mine.boot and each.boot]
        return [other for other in known if places[other] != mine and is_meant(places[other])]

    notes = []
    elsewhere = others(lambda each: each.group == mine.group and each.boot != mine.boot)
    if elsewhere:
        notes.append(
            f"MPI says that {name_ranks(elsewhere)} of the given communicator share memory with "
            f"rank {mates[0]}, but they run under another kernel: machines of one host name? They "
            "are nodes of their own"
        )
    apart = others(lambda each: each.boot == mine.boot and each.folder != mine.folder)
    if apart:
        notes.append(
            f"the machine of rank {mates[0]} also runs {name_ranks(apart)} of the given "
            "communicator, with another /dev/shm: another node. To make one node of them start the "
            "containers with --ipc=host"
        )
    beside = others(lambda each: each.group != mine.group and each[1:] == mine[1:])
    if beside:
        notes.append(
            f"{name_ranks(beside)} of the given communicator have the same /dev/shm as rank "
            f"{mates[0]}, but MPI says that they are on another node, and MPI is believed: with "
            "SLURM and PMIx, NodeName must be the host's name"
        )
    return notes

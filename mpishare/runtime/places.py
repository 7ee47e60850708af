"""The ranks that share host memory, and the findings about them, for the nodes of some of them.

Of MPI and each rank's /dev/shm neither is enough alone to tell the first. Launchers were seen to
call ranks shared that are not (containers, machines of one name), and the other way round. Nodes
within a node make no survey and no probe of their own: the rows and columns of a process grid are
made in a millisecond, and on GPUs no pair of ranks is tried again.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from mpishare.coordination.waits import of_this_thread
from mpishare.errors import name_ranks
from mpishare.memory.shared import place as place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mpishare.coordination.waits import Waits
    from mpishare.runtime.report import Pair


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


# --- findings


class Probed(NamedTuple):
    """The results of the probe of GPUs."""

    uuids: list[str]  # each rank's GPU
    pairs: tuple[Pair, ...]  # every rank with every rank

    def of(self, ranks: Sequence[int]) -> Probed:
        """Return those about some of the ranks, numbered in this order."""
        size = len(self.uuids)
        return Probed(
            [self.uuids[rank] for rank in ranks],
            tuple(
                replace(
                    self.pairs[ranks[origin] * size + ranks[target]], origin=origin, target=target
                )
                for origin, target in product(range(len(ranks)), repeat=2)
            ),
        )


class Findings(NamedTuple):
    """The findings of one node, by rank, the same on all."""

    place: list[Any] | None  # of all its ranks
    unreadable: tuple[tuple[int, int, str], ...]  # as of `Report`
    probed: Probed | None  # None on the host backend

    def of(self, ranks: Sequence[int]) -> Findings:
        """Return those about some of the ranks, numbered in this order."""
        numbers = {rank: number for number, rank in enumerate(ranks)}
        unreadable = sorted(
            (numbers[reader], numbers[owner], why)
            for reader, owner, why in self.unreadable
            if reader in numbers and owner in numbers
        )
        return Findings(self.place, tuple(unreadable), self.probed and self.probed.of(ranks))


def surveyed(place: list[Any] | None) -> dict[str, Waits]:
    """Return by their names the whole nodes of this thread that have findings, of this place.

    Those that have probed GPUs come first: a node on the host has no findings on them.
    """
    nodes = [each for each in of_this_thread() if each.life.failure is None and each.findings]
    nodes.sort(key=lambda each: each.findings.probed is None)
    return {each.name: each for each in nodes if each.findings.place == place}


def known_to_all(
    ranks_in: Sequence[Mapping[str, int]], mine: Mapping[str, Waits]
) -> Findings | None:
    """Return the findings of a node that has all these ranks; None without one.

    `ranks_in` has, for each rank, the names of the nodes whose findings it has, with its rank
    there; the result is the same on all ranks.
    """
    name = next((name for name in ranks_in[0] if all(name in each for each in ranks_in)), None)
    if name is None:
        return None
    found: Findings = mine[name].findings.of([each[name] for each in ranks_in])
    return found

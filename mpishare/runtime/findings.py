"""The findings of a node about its ranks, which the nodes of some of them take over.

These make no survey and no probe of their own: the rows and columns of a process grid are made in
a millisecond, and on GPUs no pair of ranks is tried again.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mpishare.runtime.report import Pair


class Probed(NamedTuple):
    """The results of the probe of GPUs."""

    uuids: list[str]  # each rank's GPU
    pairs: tuple[Pair, ...]  # every rank with every rank
    keeps_values: tuple[bool, ...]

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
            tuple(self.keeps_values[rank] for rank in ranks),
        )


class Findings(NamedTuple):
    """The findings of one node, by rank, the same on all."""

    name: str  # of the node that made them
    place: list[Any] | None  # of all its ranks
    facts: list[dict[str, Any]]  # of `Survey.describe`
    tried: list[dict[str, Any]]  # of `Survey.read`
    probed: Probed | None  # None on the host backend

    def of(self, ranks: Sequence[int]) -> Findings:
        """Return those about some of the ranks, numbered in this order."""
        numbers = {rank: number for number, rank in enumerate(ranks)}

        def among(tried: Mapping[str, Any]) -> dict[str, Any]:
            errors = [(numbers[owner], why) for owner, why in tried["errors"] if owner in numbers]
            return {"errors": errors, "own": errors and tried["own"]}

        return Findings(
            self.name,
            self.place,
            [self.facts[rank] for rank in ranks],
            [among(self.tried[rank]) for rank in ranks],
            self.probed and self.probed.of(ranks),
        )

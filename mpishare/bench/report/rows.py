"""One row of a report: what one variant took at one size on one clock."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Clock = Literal["latency", "throughput"]
CLOCKS: tuple[Clock, ...] = ("latency", "throughput")

#: As in the files: a variant of mpishare, a baseline, or an upper bound, which is what the machine
#: can do with no order in it or no data.
Kind = Literal["own", "rival", "ceiling"]
OWN: Kind = "own"
BASELINE: Kind = "rival"
UPPER_BOUND: Kind = "ceiling"

_NOISY = 3.0  # medians


@dataclass
class Row:
    """What one variant took at one size on one clock. The fields are the keys in JSON and CSV."""

    case: str
    arm: str  # the variant
    backend: str
    ranks: int  # each time is the maximum over them
    nbytes: int  # one face or message; 0 where no data moves
    clock: Clock  # latency: a synchronize after each iteration; throughput: after a batch of them
    # Of one iteration; None where the variant did not run, or gave a wrong result.
    median_us: float | None = None
    p95_us: float | None = None
    min_us: float | None = None
    count: int = 0  # of samples: iterations, or batches of them
    gb_per_s: float | None = None  # what one rank sends in an iteration, over the median
    ok: bool = False  # whether it ran and no check found it wrong
    reason: str | None = None  # why there is no number
    wrong: bool = False  # whether that is because a check found a wrong result
    kind: Kind = OWN
    # Below 1 mpishare is faster. For a variant of mpishare: its median over that of its fastest
    # baseline. For a baseline: the median of the fastest variant of mpishare that is compared with
    # it, over its own.
    ratio: float | None = None
    # For a halo case: owned cells per rank along each axis, ghosts per side, fields per exchange,
    # and whether edges and corners were exchanged too.
    n: int | None = None
    width: int | None = None
    fields: int | None = None
    corners: bool | None = None

    @property
    def is_noisy(self) -> bool:
        """Whether the median says little, since other programs had the cores for a part of it."""
        return bool(self.median_us and self.p95_us and self.p95_us > _NOISY * self.median_us)

    def as_dict(self) -> dict[str, Any]:
        """Return the row as in JSON."""
        values = {name: getattr(self, name) for name in COLUMNS}
        # Six digits are more than any clock resolves.
        return {
            name: float(f"{value:.6g}") if isinstance(value, float) else value
            for name, value in values.items()
        }

    def fill(self, samples_s: Sequence[float], sent_nbytes: int) -> None:
        """Set the statistics from the time of each iteration, the maximum over the ranks.

        `sent_nbytes` is what one rank sends in an iteration.
        """
        us = np.asarray(samples_s) * 1e6
        self.median_us = float(np.median(us))
        self.p95_us = float(np.percentile(us, 95))
        self.min_us = float(us.min())
        self.count = int(us.size)
        if sent_nbytes and self.median_us > 0:
            self.gb_per_s = sent_nbytes / self.median_us / 1e3
        self.ok = True

    def fail(self, reason: str, *, wrong: bool) -> None:
        """Remove every number and set the reason."""
        self.median_us = self.p95_us = self.min_us = self.gb_per_s = self.ratio = None
        self.count = 0
        self.ok = False
        self.reason = reason
        self.wrong = wrong


#: The keys of a row in JSON, and the columns of CSV.
COLUMNS = tuple(field.name for field in dataclasses.fields(Row))


def set_ratios(rows: Sequence[Row], against: Mapping[str, Sequence[str]]) -> None:
    """Set the ratios of one case and size, of each variant `against` these baselines."""
    for row in rows:
        if row.median_us is None or row.kind == UPPER_BOUND:
            continue
        # One of each pair is of mpishare, whichever of the two this row is.
        others = [
            other.median_us
            for other in rows
            if other.clock == row.clock
            and {other.kind, row.kind} == {OWN, BASELINE}
            and (other.arm in against.get(row.arm, ()) or row.arm in against.get(other.arm, ()))
            and other.median_us
        ]
        if others:
            fastest = min(others)
            row.ratio = row.median_us / fastest if row.kind == OWN else fastest / row.median_us

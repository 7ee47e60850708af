"""One row of a report: what one arm needed for one size on one clock."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Clock = Literal["latency", "throughput"]
CLOCKS: tuple[Clock, ...] = ("latency", "throughput")

Kind = Literal["own", "rival", "ceiling"]


@dataclass
class Row:
    """What one arm needed for one size on one clock.

    Attributes
    ----------
    case, arm, backend : str
        What was timed.
    ranks : int
        How many ranks took part; each time is the maximum over them.
    nbytes : int, bytes
        One face, or one message; 0 where no data moves.
    clock : str
        ``latency``: a synchronize after each iteration. ``throughput``: one after a batch of them.
    median_us, p95_us, min_us : float or None, microseconds
        Of one iteration; None where the arm did not run, or gave a wrong result.
    count : int
        How many samples stand behind them: iterations, or batches of them.
    gb_per_s : float or None, 1e9 bytes a second
        What one rank sends in an iteration, over the median; None where no data moves.
    ok : bool
        Whether the arm ran and no check found it wrong.
    reason : str or None
        Why there is no number.
    wrong : bool
        Whether that is because a check found a wrong result.
    kind : str
        ``own``: an arm of mpishare. ``rival``: what it is measured beside. ``ceiling``: what the
        machine can do at best, with no order in it or no data.
    ratio : float or None
        Below 1 mpishare is the faster one. Of an arm of mpishare: its median over that of its
        fastest rival. Of a rival: the median of the fastest arm of mpishare that is measured beside
        it, over its own.
    n, width, fields : int or None
        Of a halo case: owned cells a rank along each axis, ghosts a side, fields of an exchange.
    corners : bool or None
        Of a halo case: whether edges and corners were moved too.
    """

    case: str
    arm: str
    backend: str
    ranks: int
    nbytes: int
    clock: Clock
    median_us: float | None = None
    p95_us: float | None = None
    min_us: float | None = None
    count: int = 0
    gb_per_s: float | None = None
    ok: bool = False
    reason: str | None = None
    wrong: bool = False
    kind: Kind = "own"
    ratio: float | None = None
    n: int | None = None
    width: int | None = None
    fields: int | None = None
    corners: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the row as JSON has it.

        Local.
        """
        return {name: _shortened(getattr(self, name)) for name in COLUMNS}

    def fill(self, samples_s: Sequence[float], sent_nbytes: int) -> None:
        """Set the statistics from `samples_s`, the maximum over the ranks of each iteration.

        Local.

        Parameters
        ----------
        samples_s : sequence of float, seconds
            At least one.
        sent_nbytes : int, bytes
            What one rank sends in an iteration.
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
        """Take every number away and say why.

        Local.
        """
        self.median_us = self.p95_us = self.min_us = self.gb_per_s = self.ratio = None
        self.count = 0
        self.ok = False
        self.reason = reason
        self.wrong = wrong


def _shortened(value: Any) -> Any:
    # Six digits are more than any clock gives.
    return float(f"{value:.6g}") if isinstance(value, float) else value


#: The keys of a row in JSON, and the columns of CSV.
COLUMNS = tuple(field.name for field in dataclasses.fields(Row))


def set_ratios(rows: Sequence[Row], against: Mapping[str, Sequence[str]]) -> None:
    """Set the ratios of the rows of one case and size, clock by clock.

    Local.

    Parameters
    ----------
    rows : sequence of Row
        Of all arms.
    against : mapping of str to sequence of str
        For each arm of mpishare the rivals that it is measured beside.
    """
    for row in rows:
        if row.median_us is None or row.kind == "ceiling":
            continue
        # Of each pair one is mpishare's, whichever of them this row is.
        others = [
            other.median_us
            for other in rows
            if other.clock == row.clock
            and {other.kind, row.kind} == {"own", "rival"}
            and (other.arm in against.get(row.arm, ()) or row.arm in against.get(other.arm, ()))
            and other.median_us
        ]
        if others:
            fastest = min(others)
            row.ratio = row.median_us / fastest if row.kind == "own" else fastest / row.median_us

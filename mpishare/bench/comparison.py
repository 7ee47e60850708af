"""Time variants of a case against each other: interleaved, checked before, during and after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

import numpy as np

from mpishare.bench.cases import Case
from mpishare.bench.measure import batches_of, iterations, max_over_ranks, time_batches
from mpishare.bench.report import BASELINE, CLOCKS, OWN, Clock, Kind, Row, compare
from mpishare.bench.session import Call, Session
from mpishare.errors import UnsupportedError

Make = Callable[[], "Variant"]


#: Checked steps before the first and after the last timed block, and between two of them. Buffers
#: alternate between two places at most, so four steps use each of them twice.
_OUTER_STEPS, _INNER_STEPS = 4, 2
#: Steps that measure how long a step takes.
_TRIAL = 10


class RefusedError(UnsupportedError):
    """Raised on every rank by a timed block that could not run; the message is the reason."""


class Variant:
    """One variant of what a case times, and the check that it did it.

    All methods are called by every rank in the same order. On CUDA they are stream-ordered, except
    `time_block` and what asks the check, which wait for the GPU.
    """

    #: Counts wrong words: a `Tally`, or what has its `wrong`.
    check: Any
    #: Does once what is timed: a method, or where it is one call that call, with nothing around it,
    #: or the launch of a graph. It is deleted before `close`.
    step: Call

    #: What such a graph was captured from: its kernels may read the arrays of that.
    captured: Call | None = None

    #: Whether `step` moves what `fill` wrote, so that a timed block can be checked afterwards. A
    #: variant that only orders is checked by `checked_step`, and nowhere else.
    moves = True
    #: Whether a timed block iterates as often as fits into its time, found by trial steps.
    is_calibrated = True
    #: How many of what is reported `step` does: each has its share of the time.
    steps = 1

    def fill(self, token: int) -> None:
        """Write what this rank sends; `token` differs from step to step."""

    def poison(self) -> None:
        """Overwrite what this rank received last, so that it cannot pass for the next."""

    def verify(self, token: int) -> None:
        """Count the received words that are not those of `token`."""

    def wrong(self) -> int:
        """Return how many words were wrong since the last call."""
        return int(self.check.wrong())

    def checked_step(self, token: int) -> None:
        """Move data once, verify what arrived, and poison it for the next."""
        self.fill(token)
        self.move()
        self.verify(token)
        self.poison()

    def move(self) -> None:
        """Do a step, with what moves data where that does not."""
        self.step()

    def time_block(self, session: Session, clock: Clock, iters: int) -> list[float]:
        """Run one timed block after its warm-up and return the samples in seconds."""
        for _ in range(session.options.warmup):
            self.step()
        session.line_up()
        samples_s = time_batches(self.step, session.synchronize, *batches_of(clock, iters))
        return [each / self.steps for each in samples_s]

    def close(self) -> None:
        """Free what the variant made, which no work on the stream uses any more."""


class Comparison:
    """The variants of one case and size, timed against each other in one run, by these clocks.

    `nbytes` is one face or message, `sent_nbytes` what one rank sends in a step, 0 where no data
    moves, `unfit` why no variant can run at this size, and `of_rows` other fields of the rows.
    """

    def __init__(
        self,
        session: Session,
        case: Case,
        *,
        nbytes: int = 0,
        sent_nbytes: int = 0,
        unfit: str | None = None,
        clocks: tuple[Clock, ...] = CLOCKS,
        **of_rows: Any,
    ) -> None:
        self.session, self._case, self._clocks = session, case, clocks
        self._sent_nbytes, self._unfit = sent_nbytes, unfit
        backend, ranks = session.node.backend, session.comm.size
        self._row = Row(case.name, "", backend, ranks, nbytes, clocks[0], **of_rows)
        self._timed: list[_Timed] = []

    def includes(self, baseline: str) -> bool:
        """Return whether this run wants a baseline and the backend has it."""
        is_unasked = baseline not in self._case.on_request
        is_wanted = self.session.options.wants(baseline, unasked=is_unasked)
        return is_wanted and baseline in self._case.baselines[self.session.node.backend]

    def add(
        self,
        name: str,
        make: Make,
        *,
        kind: Kind = OWN,
        against: tuple[str, ...] | None = None,
        nbytes: int | None = None,
        sent_nbytes: int | None = None,
        unfit: str | None = None,
    ) -> None:
        """Enter a variant, the same on every rank, which `run` makes, collectively, by `make`.

        Its ratio is taken `against` these baselines, by default all of the comparison. `nbytes` and
        `sent_nbytes` may differ from those of the comparison; `unfit` is why it cannot run here.
        """
        row = replace(self._row, arm=name, kind=kind)
        row.nbytes = row.nbytes if nbytes is None else nbytes
        sent = self._sent_nbytes if sent_nbytes is None else sent_nbytes
        reason = unfit or self._unfit
        self._timed.append(_Timed(self.session, row, make, self._clocks, sent, against, reason))

    def add_baseline(
        self, baseline: str, make: Make, name: str | None = None, **arguments: Any
    ) -> None:
        """Enter a variant of a baseline, by default of its name, if this run includes that."""
        if self.includes(baseline):
            self.add(name or baseline, make, kind=BASELINE, **arguments)

    def run(self) -> None:
        """Time all variants; the session gets a row for each of them and each clock.

        Collective, host-blocking. A variant that cannot be made is a row that says why; one that
        gives a wrong result loses its numbers.
        """
        self._time()
        rows = [row for each in self._timed for row in each.rows()]
        compare(rows, {each.row.arm: each.against for each in self._timed})
        for each in reversed(self._timed):
            each.close()
        self.session.rows += rows

    def _time(self) -> None:
        session, timed = self.session, self._timed
        session.budget.begin()
        for each in timed:
            each.start()
        for each in timed:
            each.check(_OUTER_STEPS, "before the timed blocks")
            each.calibrate()
        for done in range(session.options.repeat):
            began = monotonic()
            # Each is first as often as the others, so that drift of the machine affects all alike.
            first = done % len(timed)
            for each in (*timed[first:], *timed[:first]):
                each.time()
                each.check(_INNER_STEPS, "between timed blocks")
            if not session.budget.allows(monotonic() - began):
                break
        for each in timed:
            each.check(_OUTER_STEPS - _INNER_STEPS, "after the timed blocks")


@dataclass
class _Timed:
    """One variant in a comparison: its samples so far, or the reason why it has none."""

    session: Session
    row: Row  # what its rows have in common
    make: Make
    clocks: tuple[Clock, ...]
    sent_nbytes: int
    against: tuple[str, ...] | None
    reason: str | None  # why it is not timed
    variant: Variant = field(default_factory=Variant)  # an empty one where it was not made
    is_wrong: bool = False
    token: int = 0
    iters: int = 1

    def start(self) -> None:
        """Make the variant, or find out why that fails."""
        self.samples_s: dict[Clock, list[float]] = {clock: [] for clock in self.clocks}
        if self.reason is None:
            made, self.reason = self.session.attempt(self.make)
            self.variant = made or Variant()

    def check(self, steps: int, when: str) -> None:
        """Do `steps` checked steps one after the other and agree on what they found."""
        if self.reason is not None or not self.session.options.check:
            return
        for _ in range(steps):
            self.token += 1
            self.variant.checked_step(self.token)
        self._agree(when)

    def _agree(self, when: str) -> None:
        wrong = enumerate(self.session.comm.allgather(self.variant.wrong()))
        found = ", ".join(f"{count} on rank {rank}" for rank, count in wrong if count)
        if found:
            self.is_wrong = True
            self.reason = f"wrong result {when}: words of {self.row.arm!r} not right: {found}"

    def calibrate(self) -> None:
        """Agree on how often a timed block iterates."""
        if self.reason is not None or not self.variant.is_calibrated:
            return
        session = self.session
        session.line_up()
        samples_s = time_batches(self.variant.step, session.synchronize, _TRIAL)
        step_s = float(np.median(max_over_ranks(session.comm, samples_s)))
        self.iters = session.options.iters or iterations(step_s)

    def time(self) -> None:
        """Run one timed block on each clock and check what it moved."""
        for clock in self.clocks:
            if self.reason is None:
                self._time_on(clock)

    def _time_on(self, clock: Clock) -> None:
        session, variant = self.session, self.variant
        checked = session.options.check and variant.moves
        if checked:
            self.token += 1
            variant.fill(self.token)
            variant.poison()
            session.line_up()
        try:
            self.samples_s[clock] += variant.time_block(session, clock, self.iters)
        except RefusedError as refused:
            self.reason = str(refused)
            return
        # After this, what a neighbor wrote without waiting for this rank has arrived.
        session.line_up()
        if checked:
            variant.verify(self.token)
            variant.poison()
            self._agree(f"in a timed block ({clock})")

    def rows(self) -> list[Row]:
        """Return a row for each clock. Collective: takes the maximum over the ranks."""
        rows = [replace(self.row, clock=clock) for clock in self.clocks]
        for row in rows:
            if self.reason is None:
                slowest_s = max_over_ranks(self.session.comm, self.samples_s[row.clock])
                row.fill(slowest_s.tolist(), self.sent_nbytes)
            else:
                row.fail(self.reason, wrong=self.is_wrong)
        return rows

    def close(self) -> None:
        self.session.synchronize()
        # It may be a graph, or hold views of what is closed.
        for name in ("step", "captured"):
            vars(self.variant).pop(name, None)
        self.variant.close()

"""Time the arms of a case against each other: taken in turn, checked before, during and after."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from mpishare.bench.cases import CASES
from mpishare.bench.measure import max_over_ranks, plan, time_batches, time_each
from mpishare.bench.rows import CLOCKS, Clock, Row, set_ratios

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from mpishare.bench.arm import Arm, Entry
    from mpishare.bench.session import Session

Run = TypeVar("Run")

#: Checked steps before and after the timed blocks, and between two of them. A buffer is used again
#: after two steps at the latest, so that four steps meet every one of them twice.
_OUTER_STEPS, _INNER_STEPS = 4, 2
#: Steps that tell how long a step takes: few at first, more where they are short.
_FIRST_TRIAL, _SECOND_TRIAL, _SHORT_S = 3, 30, 1e-3


class _Run:
    """One arm in a comparison: its samples so far, or why it has none."""

    def __init__(self, session: Session, entry: Entry) -> None:
        self._session = session
        self.entry = entry
        self.arm: Arm | None = None
        self.reason = entry.unfit
        self.wrong = False
        self.samples_s: dict[Clock, list[float]] = {clock: [] for clock in CLOCKS}
        self._token = 0
        if self.reason is None:
            self.arm, self.reason = session.attempt(entry.make)

    def check(self, steps: int, when: str) -> None:
        """Do `steps` checked steps one after the other and agree on what they found."""
        if self.arm is None or self.wrong or not self._session.options.check:
            return
        for _ in range(steps):
            self._token += 1
            self.arm.checked_step(self._token)
        self._agree(self.arm, when)

    def _agree(self, arm: Arm, when: str) -> None:
        found = self._session.wrong_on(arm.wrong())
        if found is not None:
            self.wrong = True
            self.reason = f"wrong result {when}: words of {self.entry.name!r} not right: {found}"

    def time(self) -> None:
        """Run one timed block on each clock and check what it moved."""
        if self.arm is None or self.wrong:
            return
        for clock in CLOCKS:
            self._time_on(self.arm, clock)

    def plan(self) -> None:
        """Agree on how often a timed block iterates."""
        if self.arm is None or self.wrong:
            return
        step_s = self._trial(self.arm, _FIRST_TRIAL).min()
        if step_s < _SHORT_S:
            step_s = np.median(self._trial(self.arm, _SECOND_TRIAL))
        self._plan = plan(self._session.options.iters, float(step_s))

    def _trial(self, arm: Arm, count: int) -> NDArray[np.float64]:
        self._line_up()
        return max_over_ranks(
            self._session.comm, time_each(arm.step, self._session.synchronize, count)
        )

    def _line_up(self) -> None:
        self._session.require_stream()
        self._session.synchronize()
        self._session.comm.Barrier()

    def _time_on(self, arm: Arm, clock: Clock) -> None:
        session = self._session
        checked = session.options.check and arm.moves and not self.wrong
        if checked:
            self._token += 1
            arm.fill(self._token)
            arm.poison()
            self._line_up()
        for _ in range(session.options.warmup):
            arm.step()
        self._line_up()
        if clock == "latency":
            samples = time_each(arm.step, session.synchronize, self._plan.iters)
        else:
            size = self._plan
            samples = time_batches(arm.step, session.synchronize, size.batches, size.batch)
        self.samples_s[clock] += samples
        # What a neighbor wrote without waiting for me is there after this.
        self._line_up()
        if checked:
            arm.count(self._token)
            arm.poison()
            self._agree(arm, f"in a timed block ({clock})")

    def rows(self, case: str, nbytes: int) -> list[Row]:
        """Return a row a clock. Collective: takes the maximum over the ranks."""
        session, rows = self._session, []
        for clock in CLOCKS:
            row = Row(
                case=case,
                arm=self.entry.name,
                backend=session.node.backend,
                ranks=session.comm.size,
                nbytes=nbytes,
                clock=clock,
                kind=self.entry.kind,
            )
            if self.reason is None:
                slowest_s = max_over_ranks(session.comm, self.samples_s[clock])
                row.fill(slowest_s.tolist(), self.entry.sent_nbytes)
            else:
                row.fail(self.reason, wrong=self.wrong)
            rows.append(row)
        return rows

    def close(self) -> None:
        """Free the arm."""
        if self.arm is not None:
            self.arm.close()


def contest(session: Session, case: str, nbytes: int, entries: Sequence[Entry]) -> list[Row]:
    """Time `entries` against each other in one run and return a row for each arm and clock.

    Collective, host-blocking. An arm that cannot be made is a row that says why; one that gives a
    wrong result loses its numbers.

    Parameters
    ----------
    session : Session
        The run.
    case : str
        The case, for the rows.
    nbytes : int, bytes
        One face or message, for the rows.
    entries : sequence of Entry
        The arms, the same on every rank.
    """
    runs = [_Run(session, entry) for entry in entries]
    for run in runs:
        run.check(_OUTER_STEPS, "before the timed blocks")
        run.plan()
    repeat = session.options.repeat
    for turn, run in in_turns(session, runs, repeat):
        session.progress.show(case, nbytes, run.entry.name)
        run.time()
        run.check(_INNER_STEPS if turn + 1 < repeat else _OUTER_STEPS, "between timed blocks")
    rows = [row for run in runs for row in run.rows(case, nbytes)]
    set_ratios(rows, {entry.name: entry.against for entry in entries})
    for run in reversed(runs):
        run.close()
    return rows


def in_turns(session: Session, runs: Sequence[Run], count: int) -> Iterator[tuple[int, Run]]:
    """Yield what is timed `count` times, with the number of the turn. Local.

    Each is first as often as the others: the machine's drift meets all of them. The bar advances
    after each turn.
    """
    for turn in range(count):
        first = turn % len(runs)
        for run in (*runs[first:], *runs[:first]):
            yield turn, run
        session.progress.advance()


def rivals(
    session: Session, case: str, makers: Mapping[str, Callable[[], list[Entry]]]
) -> list[Entry]:
    """Return the entries of the rivals that this run wants.

    Collective where one of `makers` is: a library is set up when it is wanted first.

    Parameters
    ----------
    session : Session
        The run.
    case : str
        The case.
    makers : mapping of str to callable
        For each rival its entries, and for the ceilings; called for those that are wanted and
        exist on this backend.

    Returns
    -------
    list of Entry
        A rival that was named and does not exist here is an entry that says so.
    """
    from mpishare.bench.arm import Arm, Entry

    options, backend = session.options, session.node.backend
    entries: list[Entry] = []
    for name, make in makers.items():
        if not options.wants(name, unasked=name not in CASES[case].on_request):
            continue
        if name in CASES[case].rivals[backend]:
            entries += make()
        elif name in (options.against or ()):
            unfit = f"the {backend} backend has no rival {name}"
            entries.append(Entry(name, Arm, kind="rival", unfit=unfit))
    return entries

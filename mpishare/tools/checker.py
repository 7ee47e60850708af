"""A checker of accesses to windows (`MPISHARE_CHECK=1`): races of two ranks become errors.

The accesses of a rank between two of its calls that order memory are an *interval*. Each rank has
a vector clock, the number of intervals of every rank that are ordered before its own work, and
publishes it at each such call. Two intervals without order that touched one element, one of them to
write it, are a race. Each step compares the intervals of all ranks, so that all raise.

What an interval touched is known from the arrays that the window gives (`checked_array`). A call
takes over the clocks of all ranks, even where it waits for some of them. So a race may be missed,
and none is reported between accesses that such calls order.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from itertools import combinations, product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from mpishare.coordination.agreement import Agreement, note_agreed
from mpishare.errors import EpochError, UnsupportedError, counted
from mpishare.runtime.preflight import CHECK
from mpishare.tools.checked_array import CheckedArray, Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mpishare.runtime.context import NodeContext

T = TypeVar("T")

log = logging.getLogger("mpishare")

_PLAN_CALLS = "exchange", "accumulate", "forward", "backward", "start", "wait", "reduce", "dot"
_MAX_INTERVALS = 1000  # kept by a rank between two steps


class Interval(NamedTuple):
    """The accesses of a rank between two calls that order memory."""

    number: int
    clock: Sequence[int]  # when it began
    accesses: list[tuple[str, bool, str, list[int]]]  # segment, is a write, line; see `_runs`


class Checker:
    """The intervals of this rank, and their comparison with those of the others."""

    def __init__(self, context: NodeContext, rows: memoryview[int]) -> None:
        self._memory_barrier = context.memory_barrier
        self._rank, self._size = context.rank, context.size
        self._rows = rows  # for each rank its clock as it was last published
        self._clock = [0] * context.size
        self._intervals: deque[Interval] = deque(maxlen=_MAX_INTERVALS)
        self._segments: dict[str, list[Segment]] = {}  # by window
        self._races: list[str] = []
        self._under_way: set[int] = set()  # plans in a call, which access memory on their own
        self._kinds: dict[type, type] = {}

    def watch(self, child: Any) -> None:
        """Check the accesses to a new window, and let the calls of a new plan order memory."""
        kind = type(child)
        if kind not in self._kinds:
            around = self._around_plan_call if child._closes_first else self._around_fence
            calls = _PLAN_CALLS if child._closes_first else ("fence",)
            own = {call: around(getattr(kind, call)) for call in calls if hasattr(kind, call)}
            if child._memories:
                own["segment"] = self._around_segment(kind.segment)
            self._kinds[kind] = type(kind.__name__, (kind,), own)
        child.__class__ = self._kinds[kind]  # attributes of the object would be a cycle

    def unwatch(self, child: Any) -> None:
        """Forget the segments of a window that closes."""
        self._end_interval()
        self._segments.pop(child.name, None)

    def _around_segment(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def segment(window: Any, rank: int) -> Any:
            array = method(window, rank)
            if not isinstance(array, CheckedArray):
                name = f"{window.name}.segment({rank})" if window.owner is None else window.name
                array = array.view(CheckedArray)
                array.segment = Segment(name, array, self._under_way)
                self._segments.setdefault(window.name, []).append(array.segment)
                window._arrays[rank] = array
            return array

        return segment

    # --- order

    def _around_fence(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def fence(window: Any, stream: Any = None) -> None:
            name = f"{window.name}: fence"
            window._check()
            window._context.agreement.step(name, lambda: None)
            self.raise_races(name)
            method(window, stream)

        return fence

    def _around_plan_call(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(plan: Any, *arguments: Any, **options: Any) -> Any:
            self._under_way.add(id(plan))
            self.order()
            try:
                return method(plan, *arguments, **options)
            finally:
                if plan._open is None:
                    self._under_way.discard(id(plan))
                self.order()

        return call

    def order(self) -> None:
        """Order this rank's last interval before, and its next one after, those of other ranks.

        It takes the place of the barrier between memory and a counter that is read or written.
        """
        self._memory_barrier()
        self._end_interval()
        size, mine = self._size, self._rank
        rows = [self._rows[first : first + size] for first in range(0, size * size, size)]
        self._clock = [*map(max, self._clock, *rows)]
        self._clock[mine] += 1
        for rank, count in enumerate(self._clock):
            rows[mine][rank] = count
        self._memory_barrier()

    def _end_interval(self) -> None:
        """Note the accesses since the last call."""
        accesses = []
        for segments in self._segments.values():
            for each in segments:
                accesses += [(each.name, *how, _runs(of)) for how, of in each.touched.items()]
                each.touched = {}
        if accesses:
            self._intervals.append(Interval(self._clock[self._rank] + 1, self._clock, accesses))

    # --- races

    def take(self) -> tuple[list[Interval], Sequence[int]]:
        """Return this rank's intervals and its clock, for `compare` on all ranks."""
        self.order()
        taken = [*self._intervals], self._clock
        self._intervals.clear()
        return taken

    def compare(self, taken: Sequence[Any]) -> None:
        """Look for races between the intervals of all ranks, which a step has ordered."""
        # Not the published clocks: other ranks may be further by now.
        self._clock = [*map(max, *(clock for _, clock in taken), self._clock)]
        intervals = [[Interval(*each) for each in given] for given, _ in taken]
        for a, b in combinations(range(self._size), 2):
            for mine, other in product(intervals[a], intervals[b]):
                if other.clock[a] < mine.number and mine.clock[b] < other.number:
                    self._races += _races((a, mine), (b, other))

    def raise_races(self, call: str) -> None:
        """Raise `EpochError` if races were found; every rank has the same."""
        if self._races:
            first, more = self._races[0], len(self._races) - 1
            self._races = []
            error = EpochError(
                f"{call} failed: {first}"
                + (f" ({counted(more, 'more race')} like this)" if more else "")
                + ". Call window.fence() between them on all ranks, or another call of mpishare "
                "that orders memory. The program's own MPI messages and barriers do not count: on "
                "GPUs they would not order streams either."
            )
            note_agreed(error)
            raise error


class CheckedAgreement(Agreement):
    """An agreement whose steps compare what the ranks did before them."""

    checker: Checker

    def step_keeping(self, call: str, work: Callable[[], tuple[T, Any]]) -> tuple[T, list[Any]]:
        """Do a step, then compare what all ranks did before it."""
        taken = self.checker.take()

        def do() -> tuple[T, Any]:
            kept, told = work()
            return kept, [told, taken]

        try:
            kept, replies = super().step_keeping(call, do)
        except BaseException:
            self.checker.order()  # the ranks have met nevertheless
            raise
        self.checker.compare([each[1] for each in replies])
        return kept, [each[0] for each in replies]

    def meet(self, call: str) -> None:
        """Meet in a step, which compares."""
        self.step(call, lambda: None)
        self.checker.raise_races(call)


def install(context: NodeContext) -> None:
    """Check the accesses to windows of a new node. Collective."""
    if context.backend.has_streams:
        if context.rank == 0:
            log.warning("%s=1 checks nothing here: accesses of GPUs are not seen", CHECK)
        return
    if context.native_missing is not None:  # fences in Python would order too much
        raise UnsupportedError(
            f"{CHECK}=1 needs the compiled part of the host backend, which some rank lacks: "
            f"{context.native_missing}"
        )
    checker = Checker(context, context.take_counters("Node", context.size**2).view)
    context.checker, context.memory_barrier = checker, checker.order
    agreement = context.agreement
    agreement.__class__ = CheckedAgreement
    agreement.checker = checker  # type: ignore[attr-defined]


def _runs(elements: np.ndarray[Any, Any]) -> list[int]:
    """Return where runs of touched elements begin and end."""
    found: list[int] = np.flatnonzero(np.diff(elements, prepend=False, append=False)).tolist()
    return found


def _in_both(mine: list[int], other: list[int]) -> np.ndarray[Any, Any]:
    """Return the elements that are in runs of both, in order."""
    if max(mine[0], other[0]) >= min(mine[-1], other[-1]):
        return np.empty(0, int)
    first, second = (
        np.concatenate([*map(np.arange, runs[::2], runs[1::2])]) for runs in (mine, other)
    )
    return np.intersect1d(first, second, assume_unique=True)


def _races(mine: tuple[int, Interval], other: tuple[int, Interval]) -> Iterator[str]:
    """Yield a text for each pair of lines that touched an element without order."""
    (a, first), (b, second) = mine, other
    for (name, writes, line, elements), (name2, writes2, line2, elements2) in product(
        first.accesses, second.accesses
    ):
        if name != name2 or not writes | writes2:
            continue
        both = _in_both(elements, elements2)
        if len(both):
            verbs = ["wrote" if each else "read" for each in (writes, writes2)]
            which = f"element {both[0]}"
            if len(both) > 1:
                which = f"{len(both)} elements from {both[0]} to {both[-1]}"
            yield (
                f"rank {a} {verbs[0]} {which} of {name} at {line}, and rank {b} {verbs[1]} at "
                f"{line2}, with no order between them"
            )

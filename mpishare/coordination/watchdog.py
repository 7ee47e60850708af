"""The watchdog: a thread that notices the death of a rank and releases the waits for it.

It makes no MPI call and no CUDA call. A stream that waits for a counter waits for a word of host
memory, so one store of the CPU releases it.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from mpishare.coordination import robust_futex
from mpishare.coordination.abort import say, say_at_once
from mpishare.coordination.control_block import Mark, State
from mpishare.coordination.life import Event
from mpishare.coordination.poll import STRAGGLER_S
from mpishare.coordination.where import ANSWER_S, answer, describe_all
from mpishare.errors import (
    MpiShareError,
    describe,
    describe_death,
    describe_stragglers,
    died,
    peer_error,
)
from mpishare.memory.mapped import remove_files_of_mpi

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpishare.coordination.agreement import Agreement
    from mpishare.coordination.objects import NodeObject

log = logging.getLogger("mpishare")

PERIOD_S = 0.1
# Has the seconds that the main thread may spend outside mpishare after a death, before its process
# ends: for launchers that let it wait for ever in a message to the dead rank.
EXIT_VARIABLE = "MPISHARE_EXIT_AFTER_DEATH"


class Watchdog:
    """Watches the other ranks of a node until `stop`.

    At a death it first marks the agreement broken, so that a released wait is never taken for a
    signal. `releases`: streams may wait for counters; waits of the host check the agreement
    themselves.
    """

    def __init__(self, agreement: Agreement, *, releases: bool) -> None:
        self._agreement = agreement
        self._block, self._life = agreement.block, agreement.life
        self._releases = releases
        # Returns the objects that may have put waits on streams; called in the thread too.
        self.objects: Callable[[], list[NodeObject]] = list
        self._lock = threading.RLock()
        self._pending_since: dict[tuple[str, int], float] = {}
        self._stop = threading.Event()
        self._next = (self._block.rank + 1) % self._block.size
        self._next_life = self._block.life_address(self._next)
        self._broken_at = 0.0
        self._looks = 0
        self.exit_after_s = math.inf
        self._thread = threading.Thread(target=self._run, name="mpishare-watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait until it has ended. May be repeated."""
        self._stop.set()
        while self._thread.is_alive():
            robust_futex.wake(self._next_life)  # again, as it may not have waited yet
            self._thread.join(1e-3)

    @contextmanager
    def removing(self) -> Iterator[None]:
        """Keep the thread from checking objects while one is removed from `objects`."""
        # A forked child has no such thread, and the lock may be held for good.
        with self._lock if self._block.is_mine else nullcontext():
            yield

    def look(self) -> None:
        """Check at once: another rank has released counters, so the node is broken."""
        with self._lock:
            self._check_deaths()
        failures = dict.fromkeys(self._agreement.others, "gave the node up")
        self._life.end(Event.DEPARTURE, peer_error("a call", failures))

    def pending(self) -> dict[str, list[int]]:
        """Return the pending ranks of each object that waits on a stream."""
        with self._lock:
            return {item.name: ranks for item in self.objects() if (ranks := item._pending())}

    def _run(self) -> None:
        with robust_futex.holding(self._block.life_address(self._block.rank)):
            self._watch()

    def _watch(self) -> None:
        while True:
            try:
                if self._pause():
                    return
                if self._life.failure is None:
                    self._check()
                if self._life.failure is not None:
                    self._after_failure()
                answer(self._block, self._agreement.owner)
            except Exception as error:  # the streams are released in the next round
                text = f"the watchdog of rank {self._agreement.rank} failed: {describe(error)}"
                self._life.end(Event.DEATH, MpiShareError(text))

    def _check(self) -> None:
        with self._lock:  # no object is removed meanwhile
            if self._seems_incomplete():
                self._check_deaths()
            if self._releases:
                self._check_objects()
                self._check_stragglers()

    def _pause(self) -> bool:
        """Wait a period, or until the next rank dies; return whether to stop."""
        if (
            self._life.failure is None
            and self._block.state(self._next) == State.PRESENT  # else its mark is known
            and robust_futex.wait(self._next_life, PERIOD_S)
        ):
            return self._stop.is_set()
        return self._stop.wait(PERIOD_S)

    def _after_failure(self) -> None:
        """Release the streams once the node is broken, and end a process that does not notice."""
        life = self._life
        self._broken_at = self._broken_at or time.monotonic()
        life.release(has_streams=self._releases)
        is_owed = life.is_fatal and not life.is_raised
        if is_owed and time.monotonic() - self._broken_at > self.exit_after_s:
            self._end_process()

    def _seems_incomplete(self) -> bool:
        """Whether to check every rank: one has left, died, or was seen dead by another one.

        Each rank asks whether two others run, and not all: the question takes a system call, in
        which the main thread gets Python's lock, and it keeps that for up to 5 ms. With 32 ranks,
        asking for all took longer than the period, so that all main threads were held up again and
        again.
        """
        agreement, block = self._agreement, self._block
        if not agreement.others:
            return False
        # The second one changes: a process that is stopped does not see that its neighbor died.
        neighbors = {1, 1 + self._looks % len(agreement.others)}
        self._looks += 1
        return (
            block.is_being_killed(self._next)
            or not block.are_all_present()
            or block.has_any(Mark.SAW_DEATH)
            or not all(block.is_running((block.rank + by) % block.size) for by in neighbors)
        )

    def _check_deaths(self) -> None:
        agreement, block = self._agreement, self._block
        dead = [*filter(block.is_being_killed, agreement.others)]
        dead = dead or [*filter(self._has_died, agreement.others)]
        if dead:
            where = agreement.rank, agreement.size
            line = f"mpishare: {describe_death(dead, *where)}\n"
            self._life.end(Event.DEATH, died(dead, *where, agreement.timeout_s))
            is_first = not block.has_any(Mark.SAW_DEATH)
            block.mark(Mark.SAW_DEATH)
            if is_first:
                # Before any system call, in which the main thread gets Python's lock: a launcher
                # that ends the job may leave this process a few milliseconds.
                say_at_once(line)
        elif left := self._missed():
            self._life.fail_departed(agreement.subject, left)

    def _has_died(self, rank: int) -> bool:
        # The state is read after the lock: an orderly end publishes it before it unlocks.
        return not self._block.is_running(rank) and self._block.state(rank) == State.PRESENT

    def _missed(self) -> list[int]:
        """Return the ranks that left by an exception, or in any way while streams wait for them."""
        states = {rank: self._block.state(rank) for rank in self._agreement.others}
        left = {rank for rank, state in states.items() if state == State.LEFT}
        gone = {rank for rank, state in states.items() if state != State.PRESENT}
        awaited = set[int]().union(*(self.pending().values() if gone else ()))
        return sorted(left | (gone & awaited))

    def _check_objects(self) -> None:
        # In a frame of its own: in that of the thread the last object would be held for ever.
        for item in self.objects():
            item._check_kernels()
            item._check_elsewhere()

    def _check_stragglers(self) -> None:
        now, before = time.monotonic(), self._pending_since
        self._pending_since = since = {}
        for item in self.objects():
            for rank in {*item._pending()}.intersection(self._agreement.others):
                key = item.name, rank
                since[key] = before.get(key, now)
                waited_s = now - since[key]
                if waited_s > STRAGGLER_S - ANSWER_S:
                    self._block.ask()
                if waited_s > STRAGGLER_S:
                    since[key] = math.inf  # warned of
                    where = describe_all(self._block, [rank], int(1e9 * (now - ANSWER_S)))
                    call, me = f"{item.name} on a stream", self._agreement.rank
                    log.warning("%s", describe_stragglers(call, [rank], STRAGGLER_S, me, where))

    def _end_process(self) -> None:
        # The main thread hangs elsewhere, most likely in a message to the dead rank.
        agreement = self._agreement
        say(
            f"mpishare: rank {agreement.rank} ends: {self._life.failure} No call to mpishare has "
            f"ended here for {self.exit_after_s:g} s since.\n"
        )
        remove_files_of_mpi()
        os._exit(1)

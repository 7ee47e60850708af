"""What a scene of the fault tests stands on: this rank, and what it tells the test."""

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import mpishare
from mpishare.coordination import poll, watchdog
from mpishare.plans.node_cache import context_of
from tests.helpers.held import OURS, open_files, shared_bytes
from tests.helpers.reporting import facts_of, my_rank, report
from tests.helpers.rings import ring

CALLS = ("fence", "start", "event", "allocate", "barrier")
LIMIT_S = 20.0
"""Seconds until every rank must have heard of a failure. An idle machine takes milliseconds; the
node's deadline alone comes later than a scene may last."""
NEVER_S = 1000.0


class Stage:
    """One rank of a scene."""

    def __init__(self) -> None:
        if "STAGE_STDERR" in os.environ:
            # What a rank says when its job is aborted may not come through.
            file = Path(os.environ["STAGE_STDERR"]) / str(my_rank())
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), 2)
        from mpi4py import MPI

        self.MPI = MPI
        self.world = _world or MPI.COMM_WORLD
        self.rank, self.size = self.world.rank, self.world.size
        self._left = 0.0
        # Ranks without a core are slow for no reason that a test is to see.
        poll.STRAGGLER_S = watchdog.STRAGGLER_S = NEVER_S

    def node(self, comm: object = None, timeout_s: float = NEVER_S) -> mpishare.Node:
        """Make a node, in the time that takes ranks without a core; later waits end sooner."""
        node = mpishare.Node(comm or self.world, timeout_s=NEVER_S)
        _set_deadline(node, timeout_s)
        return node

    def hurry(self, node: mpishare.Node, timeout_s: float) -> None:
        """Let waits end this soon from here on, where all ranks are: what comes before may take
        its time."""
        self.world.Barrier()
        _set_deadline(node, timeout_s)

    def quiet(self) -> None:
        """Let mpishare log errors alone: a scene may be right to be late, slow or open."""
        logging.getLogger("mpishare").setLevel(logging.ERROR)

    def attempt(self, name: str, call: Callable, *arguments: object, **options: object) -> object:
        """Make a call and tell how it ended, whatever it raised."""
        value, told = None, {"begin": time.monotonic(), "error": None}
        try:
            value = call(*arguments, **options)
        except BaseException as error:
            told |= {
                "error": type(error).__name__,
                "text": str(error),
                "ranks": getattr(error, "ranks", None),
                "failures": list(getattr(error, "failures", {}).items()),
                "name": getattr(error, "name", None),
            }
        report({name: told | {"end": time.monotonic()}})
        return value

    def raises(
        self,
        error: type[BaseException] | tuple[type[BaseException], ...],
        call: Callable,
        *arguments: object,
    ) -> Any:
        """Make a call that must raise this error, and in time; return it."""
        begin, caught = time.monotonic(), None
        try:
            call(*arguments)
        except error as raised:
            caught = raised
        seconds = time.monotonic() - begin
        assert caught is not None, f"rank {self.rank} raised no {error}"
        assert seconds < LIMIT_S, f"after {seconds} s: {caught}"
        return caught

    def fails_on(self, rank: int, error: type[BaseException], call: Callable) -> str:
        """Make a call that raises this error on a rank, and tells the others; return its text."""
        is_mine = self.rank == rank
        told = self.raises(error if is_mine else mpishare.PeerError, call)
        assert is_mine or [*told.failures] == [rank]
        return str(told) if is_mine else told.failures[rank]

    def leave(self) -> NoReturn:
        """Raise as a program does by a mistake."""
        self._left = time.monotonic()
        raise ZeroDivisionError("the words of the leaver")

    def is_left_by(self, leaver: int, work: Callable) -> None:
        """Let a rank `leave` within `work`: the others are told its words at once."""
        told = self.raises(ZeroDivisionError if self.rank == leaver else mpishare.PeerError, work)
        end = time.monotonic()
        seconds = end - self.world.bcast(self._left, leaver)
        if self.rank != leaver:
            assert seconds < LIMIT_S, f"after {seconds} s: {told}"
            # Who left because of that rank may be named beside it.
            words = "ZeroDivisionError: the words of the leaver"
            assert words in " ".join(told.failures.values())

    def ring(
        self,
        node: mpishare.Node | None,
        field: Any,
        width: Any = 1,
        comm: Any = None,
        **options: object,
    ) -> mpishare.HaloExchange:
        """A plan for a row of ranks, by default all, whose last and first are neighbors."""
        return ring(node, field, width, comm or self.world, **options)

    def make(self, what: str, node: mpishare.Node) -> Any:
        made = {
            "plan": lambda: self.ring(node, node.xp.zeros(4)),
            "plan of any fields": lambda: self.ring(node, mpishare.Layout(6, None)),
            "sum": lambda: mpishare.Allreduce(self.world, node.xp.zeros(4), node=node),
            "window": lambda: node.allocate(8, fill=0.0),
            "event": lambda: node.event(owner=0),
            "channel": lambda: node.channel(8, producer=0),
            "pool": lambda: node.pool(max_nbytes=4096),
        }
        return made[what]()

    def plan_calls(self, node: mpishare.Node, comm: Any, name: str) -> tuple[Any, list[Callable]]:
        """A plan on the host, and two calls that wait for other ranks of `comm`.

        The first is the named one, and the second what the plan is for.
        """
        field, many = (node.allocate_each(n, fill=1.0).array for n in (6, 200_000))
        x, large, rows = np.ones(8), np.ones(200_000), np.ones((2, 6))
        mesh = {(comm.rank + 1) % comm.size: [1]}, {(comm.rank - 1) % comm.size: [0]}
        ring = [(rank, 0, np.s_[1:]) for rank in range(comm.size)]
        seams = [mpishare.Seam((0, np.s_[:1]), ring, along=0, start=5 * comm.rank, shift="n")]

        def halo() -> mpishare.HaloExchange:
            return self.ring(node, field, comm=comm)

        def total(like: np.ndarray = x) -> mpishare.Allreduce:
            return mpishare.Allreduce(comm, like, node=node)

        kinds = {
            "exchange": (halo, lambda plan: plan.exchange(field)),
            "wait": (halo, lambda plan: (plan.start(field), plan.wait())),
            "accumulate": (halo, lambda plan: plan.accumulate(field)),
            "neighbors": (
                lambda: mpishare.NeighborExchange(comm, *mesh, field, node=node),
                lambda plan: plan.exchange(field),
            ),
            "seams": (
                lambda: mpishare.SeamExchange(comm, field, seams, node=node),
                lambda plan: plan.exchange(field, shift={"n": 4}),
            ),
            "adjoint of seams": (
                lambda: mpishare.SeamExchange(comm, field, seams, node=node),
                lambda plan: plan.accumulate(field, shift={"n": 4}),
            ),
            "reduce": (total, lambda plan: plan.reduce(x)),
            "reduce many": (lambda: total(large), lambda plan: plan.reduce(large)),
            "reduce a window": (lambda: total(many), lambda plan: plan.reduce(many)),
            "dot": (total, lambda plan: plan.dot(x, x)),
            "redistribute": (
                lambda: mpishare.Redistribute(comm, (2 * comm.size, 6), 0, 1, node=node),
                lambda plan: plan.backward(plan.forward(rows)),
            ),
            "rows": (
                lambda: mpishare.RowExchange(comm, ["f8"], node=node),
                lambda plan: (plan.start([x], dict.fromkeys(plan.peers, (0, 8))), plan.wait()),
            ),
        }
        word, _, of = name.partition(" of a ")  # make, close
        make, call = kinds[{"halo": "exchange", "sum": "dot"}[of] if of else name]
        plan = make()
        for _ in range(3):
            call(plan)
        node.barrier()
        first = {"make": make, "close": plan.close}.get(word)
        return plan, [first or (lambda: [call(plan) for _ in range(10)]), lambda: call(plan)]

    def calls(self, node: mpishare.Node, missing: int) -> dict[str, Callable]:
        """Calls that wait for the rank `missing`, with its own side of them where it is called."""
        window = node.allocate(8, fill=0.0)
        event = node.event(owner=missing)
        on_stream = node.backend == "cuda"

        def then_synchronize(call: Callable) -> Callable:
            return lambda: (call(), node.synchronize() if on_stream else None)

        return {
            "fence": then_synchronize(window.fence),
            "start": then_synchronize(lambda: window.start([missing])),
            "event": event.record if self.rank == missing else event.wait,
            "allocate": lambda: node.allocate(8),
            "barrier": node.barrier,
        }

    def stream_waits(
        self, node: mpishare.Node, stream: Any, enqueue: Callable, then: Callable, *, dies: bool
    ) -> None:
        """Let rank 0's stream wait for rank 1, which dies, or never comes. Ends the scene.

        `then` is another call that would wait for rank 1, given a stream.
        """
        node.synchronize(stream)
        node.barrier()
        if self.rank == 1:
            if dies:
                self.die(0.5)
            self.world.Barrier()
            return
        enqueue()
        self.attempt("synchronize", node.synchronize, stream)
        time.sleep(0.3)
        report({"is done": stream.done})
        self.attempt("afterwards", then, stream)
        if not dies:
            self.world.Barrier()

    def amid_next_wait(self, handler: Callable[[], object]) -> None:
        """Let a handler of a signal run in the midst of the next long wait of this rank."""
        sleep, yield_core = time.sleep, poll.yield_core

        def interrupt(*_: float) -> None:
            if sys._getframe(1).f_code.co_name != "poll":
                return yield_core()
            time.sleep, poll.yield_core = sleep, yield_core
            return signal.raise_signal(signal.SIGUSR2)

        signal.signal(signal.SIGUSR2, lambda *_: handler())
        time.sleep = poll.yield_core = interrupt  # one or the other stands between two looks

    def use_another_node(self, comm: object = None) -> None:
        with self.node(comm) as node:
            window = node.allocate(node.size, dtype="i8", fill=-1)
            window.array[node.rank] = node.rank
            window.fence()
            node.synchronize()
            assert window.array.tolist() == list(range(node.size))
            node.barrier()

    def second_node(self, comm: object) -> None:
        self.attempt("second node", self.use_another_node, comm)

    def gather(self, value: object) -> list:
        return self.world.allgather(value)

    def lose_rank_0(self, places: Sequence[str], prepare: Callable) -> None:
        """Let rank 0 die while each other rank, on a node of the two, is in the call of its place.

        `prepare(node, comm, place)` returns that call and another one. Ends the scene.
        """
        for rank in [self.rank] if self.rank else range(1, self.size):
            comm = self.world.Create_group(self.world.group.Incl([0, rank]), rank)
            node = self.node(comm)
            first, then = prepare(node, comm, places[rank - 1])
        rest = self.world.Split(self.rank == 0, self.rank)
        if self.rank == 0:
            self.die(0.4)
        self.attempt("first", first)
        self.attempt("then", then)
        self.attempt("close", node.close)
        rest.Barrier()
        self.end()

    def is_missing(self, *, dies: bool, rank: int = 1) -> bool:
        """Whether this is the rank that dies, or stays away until the others abort the job."""
        if self.rank != rank:
            return False
        if dies:
            self.die(0.4)
        report({"away": True})
        time.sleep(NEVER_S)
        return True

    def until_told(self, *names: str) -> None:
        """Wait until each other rank has told something by one of these names."""
        others = {*range(self.size)} - {self.rank}
        while any(facts_of(rank).keys().isdisjoint(names) for rank in others):
            time.sleep(0.01)

    def end(self) -> None:
        """End a scene in which a rank is missing: each of the others aborts the job at its exit.

        Not before each has told what became of it, and rank 0 first.
        """
        report({"at the end": True})
        self.until_told("died", "away", "at the end")
        time.sleep(0 if self.rank == 0 else 0.5)

    def die(self, after_s: float = 0.0) -> None:
        time.sleep(after_s)
        report({"died": time.monotonic()})
        os.kill(os.getpid(), signal.SIGKILL)


def _set_deadline(node: mpishare.Node, timeout_s: float) -> None:
    agreement = context_of(node).agreement
    agreement.timeout_s = agreement.life._timeout_s = timeout_s


def leftovers() -> list[str]:
    """What this process holds of mpishare's since the scene began: mappings, files, threads."""
    gc.collect()  # an object may hold its views until then
    before, nbytes = _before
    found = [each for each in _open() if each not in before]
    grown = shared_bytes() - nbytes
    return found + [f"{grown} bytes mapped"] * bool(grown)


def begin() -> None:
    """Leave out what an earlier scene of this process still holds, and messages that it awaits."""
    from mpi4py import MPI

    from mpishare.coordination.waits import of_this_thread

    global _before, _world
    _world = MPI.COMM_WORLD.Dup()
    for node in of_this_thread():
        node.kept = None  # one of several nodes may wait for messages
    gc.collect()
    _before = _open(), shared_bytes()


def has_threads() -> bool:
    """Whether a thread of mpishare's runs."""
    return any("mpishare" in thread.name for thread in threading.enumerate())


def _open() -> list[str]:
    found = [file for file in open_files() if file.startswith(OURS)]
    return found + [thread.name for thread in threading.enumerate() if "mpishare" in thread.name]


_before: tuple[list[str], int] = [], 0
_world: Any = None  # of a scene that is one of several

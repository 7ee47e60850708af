"""Case ``setup``: making a node, windows, an event and plans; closing them is not counted.

All of it blocks the host, so that there is one clock. The baseline is a window of MPI alone, made
and filled by one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from mpi4py import MPI

from mpishare import Event, HaloExchange, Node, Window
from mpishare.bench.cases import Case
from mpishare.bench.check import Tally
from mpishare.bench.comparison import Comparison, RefusedError, Variant
from mpishare.bench.measure import time_batches
from mpishare.bench.report import Clock
from mpishare.bench.session import Session, do_nothing

_NBYTES = 1 << 20
_SHAPE = (_NBYTES // 8,)
_FILL = 0x5A5A_5A5A_5A5A_5A5A
#: A node takes long enough that the median of a few is enough.
_LEAST_TURNS = 3
#: The fields of a plan: owned rows, and the cells of one, which is a face.
_OWNED, _CELLS = 4, 64
FACE_NBYTES = 8 * _CELLS


def run(session: Session, case: Case) -> None:
    comparison = Comparison(session, case, clocks=("latency",))
    comm, node, timeout_s = session.comm, session.node, session.options.timeout_s

    def add(name: str, *functions: Callable[..., Any], nbytes: int = 0, against: str = "") -> None:
        make = partial(Make, session, *functions)
        comparison.add(name, make, nbytes=nbytes, against=(against,))

    def wrong_node(made: Node) -> int:
        return int(made.ranks != node.ranks) + int(made.rank != node.rank)

    def wrong_event(made: Event) -> int:
        if node.is_leader:
            made.record()
        else:
            made.wait()
        session.synchronize()
        return 0

    def wrong_of_all(window: Window) -> int:
        return sum(_wrong_words(window.segment(rank)) for rank in range(node.size))

    allocate = partial(node.allocate, _SHAPE, "u8", fill=_FILL)
    allocate_each = partial(node.allocate_each, _SHAPE, "u8", fill=_FILL)
    # On the host, memory that exists already and can be shared is that of a window.
    base = allocate_each()
    on_gpu = node.xp.full(_SHAPE, _FILL, "u8") if session.on_cuda else None

    def share_each() -> Window:
        return node.share_each(base.array if on_gpu is None else on_gpu, copy=False)

    add("Node", partial(Node, comm, timeout_s=timeout_s), wrong_node)
    add("event", node.event, wrong_event)
    add("allocate", allocate, _wrong_of_one, nbytes=_NBYTES, against="allocate_shared")
    add("allocate_each", allocate_each, wrong_of_all, nbytes=_NBYTES)
    add("share_each", share_each, wrong_of_all, nbytes=_NBYTES)
    cart = comm.Create_cart([comm.size], [True], reorder=False)
    for name, count, is_second in (
        ("plan", 1, False),
        ("plan, 16 fields", 16, False),
        ("second plan", 1, True),
    ):
        make = partial(_Plan, session, cart, count, is_second=is_second)
        comparison.add(name, make, nbytes=FACE_NBYTES, against=())
    make_shared = partial(Make, session, partial(_shared_window, node), _wrong_of_one)
    comparison.add_baseline("allocate_shared", make_shared, nbytes=_NBYTES)
    comparison.run(_LEAST_TURNS)
    cart.Free()
    base.close()


def _shared_window(node: Node) -> Any:
    """Make memory of MPI for the ranks of a node, filled by the leader."""
    window = MPI.Win.Allocate_shared(_NBYTES if node.is_leader else 0, 8, comm=node.comm)
    array = np.asarray(window.Shared_query(node.leader)[0]).view("u8")
    if node.is_leader:
        array.fill(_FILL)
    node.comm.Barrier()
    return SimpleNamespace(array=array, close=window.Free)


def _wrong_of_one(window: Any) -> int:
    return _wrong_words(window.array)


def _wrong_words(array: Any) -> int:
    return int((array != _FILL).sum())


class Make(Variant):
    """One thing that is made, checked and closed in each timed block, which is the check.

    `make` makes it, collectively; `wrong_in` returns how many words of it are wrong.
    """

    is_calibrated = False

    def __init__(
        self, session: Session, make: Callable[[], Any], wrong_in: Callable[[Any], int]
    ) -> None:
        self.session, self.node = session, session.node
        self._make, self._wrong_in = make, wrong_in
        self.check = Tally(np)

    def around(self) -> AbstractContextManager[object]:
        """Return what makes and closes, untimed, what it needs. Collective."""
        return nullcontext()

    def free(self, made: Any) -> None:
        made.close()

    def once(self) -> list[float]:
        """Make it once, check it and close it, and return the time of making in seconds."""
        found: list[tuple[Any, str | None]] = []
        attempt = partial(self.session.attempt, self._make)
        with self.around():
            self.session.line_up()
            samples_s = time_batches(lambda: found.append(attempt()), do_nothing, 1)
            made, reason = found.pop()
            if made is not None:
                if self.session.options.check:
                    self.check.add(self._wrong_in(made))
                self.free(made)
        if reason is not None:
            raise RefusedError(reason)
        return samples_s

    def time_block(self, session: Session, clock: Clock, iters: int) -> list[float]:  # noqa: ARG002
        return self.once()

    def checked_step(self, token: int) -> None:
        """Do nothing."""


class _Plan(Make):
    """A plan for the ghosts of thin blocks in a ring, with warm kernels.

    It is the first of its node, or, `is_second`, beside another one of the same ranks.
    """

    def __init__(
        self, session: Session, cart: MPI.Cartcomm, count: int, *, is_second: bool
    ) -> None:
        super().__init__(session, self.make, self.wrong_ghosts)
        self.cart, self._is_second = cart, is_second
        shape = (_OWNED + 2, _CELLS)
        self.fields = [self.node.xp.full(shape, cart.rank, float) for _ in range(count)]
        # Loads the kernels, of the exchange and of its check.
        self.once()

    @contextmanager
    def around(self) -> Iterator[None]:
        # Nothing has been opened on it yet.
        with Node(self.session.comm, timeout_s=self.session.options.timeout_s) as self._new:
            first = self.make() if self._is_second else None
            yield
            if first is not None:
                first.close()

    def make(self) -> Any:
        return HaloExchange(self.cart, self.fields, 1, axes=(0,), node=self._new)

    def wrong_ghosts(self, made: Any) -> int:
        for field in self.fields:
            field[[0, -1]] = -1
        made.exchange(*self.fields)
        ends = zip((0, -1), self.cart.Shift(0, 1), strict=True)
        pairs = [(field[row], rank) for row, rank in ends for field in self.fields]
        return sum(int((ghosts != rank).sum()) for ghosts, rank in pairs)

"""Case ``setup``: making a node, a window and a plan; closing them is not counted.

All of it blocks the host, so that there is one clock. The baseline is a window that MPI has, made
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

from mpishare import HaloExchange, Node
from mpishare.bench.cases import Case
from mpishare.bench.check import Tally
from mpishare.bench.comparison import Comparison, RefusedError, Variant
from mpishare.bench.measure import time_batches
from mpishare.bench.report import Clock
from mpishare.bench.session import Session, do_nothing

_NBYTES = 1 << 20
_FILL = 0x5A5A_5A5A_5A5A_5A5A
#: The field of a plan, of thin blocks in a ring: owned rows, and the cells of one, which is a face.
_OWNED, _CELLS = 4, 64


def run(session: Session, case: Case) -> None:
    node, comparison = session.node, Comparison(session, case, clocks=("latency",))
    new_node = partial(Node, session.comm, timeout_s=session.options.timeout_s)

    def wrong_node(made: Node) -> int:
        return int(made.ranks != node.ranks) + int(made.rank != node.rank)

    def wrong_window(made: Any) -> int:
        return int((made.array != _FILL).sum())

    allocate = partial(node.allocate, _NBYTES // 8, "u8", fill=_FILL)
    cart = session.comm.Create_cart([session.comm.size], [True], reorder=False)
    add = comparison.add
    add("Node", partial(Make, session, new_node, wrong_node), against=())
    add("allocate", partial(Make, session, allocate, wrong_window), nbytes=_NBYTES)
    add("plan", partial(_plan, session, new_node, cart), nbytes=8 * _CELLS, against=())
    by_mpi = partial(Make, session, partial(_shared_window, node), wrong_window)
    comparison.add_baseline("allocate_shared", by_mpi, nbytes=_NBYTES)
    comparison.run()
    cart.Free()


def _shared_window(node: Node) -> Any:
    """Make memory of MPI for the ranks of a node, filled by the leader."""
    window = MPI.Win.Allocate_shared(_NBYTES if node.is_leader else 0, 8, comm=node.comm)
    array = np.asarray(window.Shared_query(node.leader)[0]).view("u8")
    if node.is_leader:
        array.fill(_FILL)
    node.comm.Barrier()
    return SimpleNamespace(array=array, close=window.Free)


class Make(Variant):
    """One thing that is made, checked and closed in each timed block, which is the check.

    `make` makes it, collectively; `wrong_in` returns how many words of it are wrong. `around` makes
    and closes, untimed, what it needs, collectively.
    """

    is_calibrated = False

    def __init__(
        self,
        session: Session,
        make: Callable[[], Any],
        wrong_in: Callable[[Any], int],
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._make, self._wrong_in, self._around = make, wrong_in, around
        self.check = Tally(np)
        self.time_block(session)  # loads the kernels, also those of the check

    def time_block(self, session: Session, clock: Clock = "latency", iters: int = 1) -> list[float]:  # noqa: ARG002
        found: list[tuple[Any, str | None]] = []
        with self._around():
            session.line_up()
            attempt = partial(session.attempt, self._make)
            samples_s = time_batches(lambda: found.append(attempt()), do_nothing, 1)
            made, reason = found.pop()
            if made is not None:
                if session.options.check:
                    self.check.add(self._wrong_in(made))
                made.close()
        if reason is not None:
            raise RefusedError(reason)
        return samples_s

    def checked_step(self, token: int) -> None:
        """Do nothing."""


def _plan(session: Session, new_node: Callable[[], Node], cart: MPI.Cartcomm) -> Make:
    """Return what makes a plan on a node of its own, which has none yet."""
    field = session.node.xp.full((_OWNED + 2, _CELLS), cart.rank, float)
    own: list[Node] = []

    @contextmanager
    def around() -> Iterator[None]:
        with new_node() as node:
            own[:] = [node]
            yield

    def make() -> HaloExchange:
        return HaloExchange(cart, field, 1, axes=(0,), node=own[0])

    def wrong_ghosts(made: HaloExchange) -> int:
        field[[0, -1]] = -1
        made.exchange(field)
        low, high = cart.Shift(0, 1)
        return int((field[0] != low).sum()) + int((field[-1] != high).sum())

    return Make(session, make, wrong_ghosts, around)

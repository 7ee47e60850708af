"""Case ``seams``: faces that meet turned, as those of a cubed sphere, beside faces that do not.

The ranks are a ring of square blocks. The ghosts at both ends of axis 0 are, turned and reversed,
owned cells at an end of axis 1 of the ranks before and behind. The baselines are messages, packed
in the order of the sender and unpacked turned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpishare import Seam, SeamExchange
from mpishare.bench.cases import Case
from mpishare.bench.check import Check, Part, word
from mpishare.bench.comparison import Comparison
from mpishare.bench.grid import ITEM_NBYTES, Exchange, Problem, Side
from mpishare.bench.halo import Forms, add_baselines
from mpishare.bench.mpi import isend, persistent
from mpishare.bench.session import Bound, Session
from mpishare.bench.staged import staged

_WIDTH = 3  # ghosts, as of finite volumes on a cubed sphere
_LEAST = 2 * _WIDTH  # cells along an axis: what leaves at one end does not at the other
_SETS = 16  # fields of a rank for all variants
_FORMS: Forms = {"isend": isend, "persistent": persistent, "staged": staged}


class Ring(Problem):
    """Square blocks whose faces meet, turned or as they are."""

    def __init__(self, session: Session, n: int, *, is_turned: bool) -> None:
        comm = session.comm
        self.session, self.comm, self.n, self.is_turned = session, comm, n, is_turned
        self.side_nbytes = ITEM_NBYTES * n * _WIDTH
        self.sent_nbytes = 2 * self.side_nbytes
        w, ends = _WIDTH, (np.s_[-2 * _WIDTH : -_WIDTH], np.s_[_WIDTH : 2 * _WIDTH])
        self.sides = tuple(
            Side(
                (comm.rank - step) % comm.size,
                (comm.rank + step) % comm.size,
                number,
                (slice(w, -w), end) if is_turned else (end, slice(w, -w)),
                (slice(0, w) if step < 0 else slice(-w, None), slice(w, -w)),
            )
            for number, (step, end) in enumerate(zip((-1, 1), ends, strict=True))
        )
        _, self.unfit = session.attempt(self._allocate)

    def _allocate(self) -> None:
        self.fields = self.arrays(self.session.node.xp.zeros)
        sent = [Part(0, side.out, self._words(self.comm.rank), k) for k, side in self._numbered()]
        received = [
            Part(0, side.into, self._turned(self._words(side.source)), k)
            for k, side in self._numbered()
        ]
        poisoned = [(0, side.into) for side in self.sides]
        self.check = Check(self.session.node.xp, self.fields, sent, received, poisoned)

    def _numbered(self) -> Any:
        return ((word(0, number, 0), side) for number, side in enumerate(self.sides))

    def _words(self, owner: int) -> Any:
        """Return the words of a face, as it leaves."""
        shape = (self.n, _WIDTH) if self.is_turned else (_WIDTH, self.n)
        xp = self.session.node.xp
        return xp.arange(self.n * _WIDTH, dtype="u8").reshape(shape) + xp.uint64(word(owner, 0, 0))

    def _turned(self, cells: Any) -> Any:
        return cells.T[:, ::-1] if self.is_turned else cells

    def arrays(self, allocate: Callable[..., Any]) -> Sequence[Any]:
        return (allocate((self.n + 2 * _WIDTH,) * 2, float),)

    def arriving(self, side: Side, fields: Sequence[Any]) -> list[Any]:
        """Return the ghosts in the order in which their cells leave."""
        cells = fields[0][side.into]
        return [cells[:, ::-1].T if self.is_turned else cells]

    def seams(self) -> list[Seam]:
        """Return the seams of this rank."""
        axes, flip = ((1, 0), (1,)) if self.is_turned else (None, ())
        return [
            Seam((0, side.into), (side.source, 0, side.out), axes=axes, flip=flip)
            for side in self.sides
        ]


def run(session: Session, case: Case) -> None:
    def of_size(nbytes: int) -> tuple[int, int, int]:
        n = max(nbytes // (ITEM_NBYTES * _WIDTH), _LEAST)
        return n, ITEM_NBYTES * n * _WIDTH, _SETS * ITEM_NBYTES * (n + 2 * _WIDTH) ** 2

    for n in session.blocks(case, of_size):
        turned, straight = (Ring(session, n, is_turned=each) for each in (True, False))
        comparison = Comparison(
            session,
            case,
            nbytes=turned.side_nbytes,
            sent_nbytes=turned.sent_nbytes,
            unfit=turned.unfit or straight.unfit,
            n=n,
        )
        for name, problem in (("turned", turned), ("as they are", straight)):
            comparison.add(name, partial(Exchange, problem, _own))
        comparison.add("turned, windows", partial(Exchange, turned, _own, in_windows=True))
        add_baselines(comparison, turned, _FORMS)
        comparison.run()


def _own(problem: Ring, field: Any) -> Bound:
    plan = SeamExchange(problem.comm, field, problem.seams(), node=problem.session.node)
    return partial(plan.exchange, field), plan.close

"""Upper bounds of a ring of GPUs: no exchange can be faster. CUDA only.

None of them is an exchange: ``copy engine`` and ``SM stores`` move both faces into the neighbors'
memory with no order between the ranks, ``graph launch`` launches an empty kernel, ``flag hop``
writes a number to both neighbors and waits for both of theirs, with no data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpishare import Window
from mpishare.bench.comparison import Comparison, Make, Variant
from mpishare.bench.fence import Order, Ring, WindowRing
from mpishare.bench.grid import Problem
from mpishare.bench.library import captured
from mpishare.bench.report import UPPER_BOUND
from mpishare.bench.session import Call, Session, in_turn
from mpishare.bench.staged import copy_call

_BLOCK = 512
#: Thread blocks per face: with 264 in all the stores of an H200 are as fast as it can.
_MAX_BLOCKS = 132
_WORDS_PER_THREAD = 2
#: A flag has 128 bytes of its own, as in the kernel.
_FLAG_WORDS = 16


def enter_ceilings(comparison: Comparison, problem: Problem) -> None:
    """Enter the upper bounds of moving as many bytes to each neighbor. Collective."""
    session, nbytes = problem.session, problem.side_nbytes
    ring = Ring(session, nbytes)
    is_whole = session.node.size == session.comm.size
    refusal = ring.unfit if is_whole else "a ceiling is that of one node"
    device = session.node.device
    is_shared = session.ranks_per_gpu > 1 and device is not None and not device.mps
    spins = "it spins, and ranks share a GPU without MPS" if is_shared else None

    def add(name: str, make: Make, sent_nbytes: int, unfit: str | None) -> None:
        comparison.add(name, make, kind=UPPER_BOUND, sent_nbytes=sent_nbytes, unfit=unfit)

    copies, stores = partial(_copies, session), partial(_stores, session)
    add("copy engine", partial(_Unordered, ring, copies), 2 * nbytes, refusal)
    add("SM stores", captured(session, partial(_Unordered, ring, stores)), 2 * nbytes, refusal)
    add("graph launch", captured(session, partial(Launch, session)), 0, refusal)
    add("flag hop", captured(session, partial(_Hop, ring)), 0, refusal or spins)


def _kernel(session: Session, name: str) -> Any:
    code = Path(__file__).with_suffix(".cu").read_text()
    return session.node.xp.RawModule(code=code).get_function(name)


def _stores(session: Session, copies: Sequence[Copy]) -> Call:
    """Return the launch of a kernel that stores both faces."""
    (to_left, face), (to_right, _) = copies
    words = int(face.size)
    blocks = min(-(-words // (_WORDS_PER_THREAD * _BLOCK)), _MAX_BLOCKS)
    arguments = to_left, to_right, face, np.int64(words)  # the other face is behind it
    return partial(_kernel(session, "store"), (blocks, 2), (_BLOCK,), arguments)


def _copies(session: Session, copies: Sequence[Copy]) -> Call:
    """Return two copies of the copy engine in turn: one of them saturates the link."""
    return in_turn(*(copy_call(session, to, face) for to, face in copies))


#: A face that is to go, behind the place for it in the segment of another rank.
Copy = tuple[Any, Any]


class _Unordered(WindowRing):
    """Stores with no order between the ranks; a checked step has a fence before and behind them."""

    def __init__(self, ring: Ring, stores: Callable[[Sequence[Copy]], Call]) -> None:
        def order(window: Window) -> Order:
            return (window.fence,), (window.fence,)

        super().__init__(ring, order, places=1, moves=True)
        self.step = stores(self.copies[0])

    def store(self) -> None:
        self.step()


class Launch(Variant):
    """The launch of an empty kernel: there is nothing to check."""

    moves = False

    def __init__(self, session: Session) -> None:
        self.step = partial(_kernel(session, "nothing"), (1,), (1,), ())

    def checked_step(self, token: int) -> None:  # noqa: ARG002
        self.step()

    def wrong(self) -> int:
        return 0


class _Hop(Launch):
    """A number to both neighbors, and theirs back; checked by the numbers, which it counts."""

    def __init__(self, ring: Ring) -> None:
        self._window = ring.node.allocate_each((2, _FLAG_WORDS), "u8", fill=0)
        self._launches = ring.node.xp.zeros(1, "u8")
        to = [self._window.segment(rank)[k] for k, rank in enumerate(ring.targets)]
        arguments = *to, self._window.array, self._launches
        self.step = partial(_kernel(ring.session, "hop"), (1,), (1,), arguments)

    def wrong(self) -> int:
        # The neighbors that have written less than this rank.
        return int((self._window.array[:, 0] < self._launches).sum())

    def close(self) -> None:
        self._window.close()

"""Upper bounds of a ring of GPUs: no exchange can be faster. CUDA only.

None of them is an exchange: ``copy engine`` and ``SM stores`` move both faces into the neighbors'
memory with no order between the ranks, ``graph launch`` launches an empty kernel, ``flag hop``
writes a number to both neighbors and waits for both of theirs, with no data.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ring import LEFTWARD, RIGHTWARD, Ring, WindowRing
from mpishare.bench.comparison import Comparison, Make, Variant
from mpishare.bench.grid import Problem
from mpishare.bench.library import captured
from mpishare.bench.report import UPPER_BOUND
from mpishare.bench.session import Bound, Session, do_nothing, in_turn
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

    add("copy engine", partial(_Copies, ring), 2 * nbytes, refusal)
    add("SM stores", captured(session, partial(_Stores, ring)), 2 * nbytes, refusal)
    add("graph launch", captured(session, partial(Launch, session)), 0, refusal)
    add("flag hop", captured(session, partial(_Hop, ring)), 0, refusal or spins)


def _kernel(session: Session, name: str) -> Any:
    code = Path(__file__).with_suffix(".cu").read_text()
    return session.node.xp.RawModule(code=code).get_function(name)


class _Stores(WindowRing):
    """A kernel stores both faces into the neighbors' segments."""

    def bind(self, ring: Ring, *fields: Any) -> Bound:
        threads = -(-ring.words // _WORDS_PER_THREAD)
        blocks = min(-(-threads // _BLOCK), _MAX_BLOCKS)
        arguments = self.to_left[0], self.to_right[0], fields[0], np.int64(ring.words)
        return partial(
            _kernel(ring.session, "store"), (blocks, 2), (_BLOCK,), arguments
        ), do_nothing

    def move(self) -> None:
        self.window.fence()
        self.step()
        self.window.fence()


class _Copies(_Stores):
    """Two copies of the copy engine, one after the other: one of them saturates the link."""

    def bind(self, ring: Ring, *fields: Any) -> Bound:
        faces = fields[0]
        pairs = (self.to_left[0], faces[LEFTWARD]), (self.to_right[0], faces[RIGHTWARD])
        return in_turn(*(copy_call(ring.session, to, face) for to, face in pairs)), do_nothing


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
        to_left = self._window.segment(ring.left)[LEFTWARD]
        to_right = self._window.segment(ring.right)[RIGHTWARD]
        arguments = to_left, to_right, self._window.array, self._launches
        self.step = partial(_kernel(ring.session, "hop"), (1,), (1,), arguments)

    def wrong(self) -> int:
        # The neighbors that have written less than this rank.
        return int((self._window.array[:, 0] < self._launches).sum())

    def close(self) -> None:
        self._window.close()

"""The ceilings of a ring of GPUs: what no exchange can be faster than. CUDA only.

They are no rivals, since none of them is an exchange: ``copy engine`` and ``SM stores`` move both
faces into the neighbors' memory with no order between the ranks, ``graph launch`` launches an empty
kernel, ``flag hop`` tells both neighbors a number and waits for both of theirs, with no data.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.bench.arm import Arm, Entry
from mpishare.bench.cases.captured import Captured
from mpishare.bench.cases.neighbors import LEFT, RIGHT, Ring, RingArm

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.bench.session import Session

# cudaMemcpyKind
_DEVICE_TO_DEVICE = 3
_BLOCK = 512
#: Blocks a face: from 264 in all an H200 stores as fast as it can.
_MOST_BLOCKS = 132
_WORDS_A_THREAD = 2
#: A flag has 128 bytes of its own, as the kernel has it.
_FLAG_WORDS = 16


def entries(session: Session, nbytes: int, reason: str | None) -> list[Entry]:
    """Return the ceilings of moving `nbytes` to each neighbor. Collective.

    Parameters
    ----------
    session : Session
        The run.
    nbytes : int, bytes
        One face.
    reason : str or None
        Why nothing can run at this size.
    """
    if reason is None and session.node.size < session.comm.size:
        reason = "a ceiling is that of one node"
    spins = None
    device = session.node.device
    if session.crowd > 1 and device is not None and not device.mps:
        spins = "it spins, and ranks share a GPU without MPS"

    ring, refusal = session.attempt(lambda: Ring(session, nbytes))

    def graph_of(kind: type[RingArm], ring: Ring) -> Arm:
        return Captured(session, kind(ring))

    def entry(
        name: str, arm: Callable[[Ring], Arm], sent_nbytes: int, unfit: str | None = None
    ) -> Entry:
        make = Arm if ring is None else partial(arm, ring)
        return Entry(name, make, sent_nbytes, kind="ceiling", unfit=reason or refusal or unfit)

    return [
        entry("copy engine", _Copies, 2 * nbytes),
        entry("SM stores", partial(graph_of, _Stores), 2 * nbytes),
        entry("graph launch", partial(graph_of, _Launch), 0),
        entry("flag hop", partial(graph_of, _Hop), 0, spins),
    ]


def _kernel(ring: Ring, name: str) -> Any:
    code = Path(__file__).with_name("ceilings.cu").read_text()
    return ring.node.xp.RawModule(code=code).get_function(name)


class _Stores(RingArm):
    """A kernel stores both faces into the neighbors' segments."""

    def __init__(self, ring: Ring) -> None:
        super().__init__(ring)
        self.window = ring.node.allocate_each((2, ring.words), "u8", fill=0)
        # My left neighbor has me on its right.
        self.to_left = self.window.segment(ring.left)[RIGHT]
        self.to_right = self.window.segment(ring.right)[LEFT]
        self.prepare()

    def prepare(self) -> None:
        """Make what the step needs. Local."""
        threads = -(-self.ring.words // _WORDS_A_THREAD)
        blocks = min(-(-threads // _BLOCK), _MOST_BLOCKS)
        self._kernel = _kernel(self.ring, "store")
        self._launch = (blocks, 2), (_BLOCK,)
        words = np.int64(self.ring.words)
        self._arguments: Any = self.to_left, self.to_right, self.faces, words

    def ghosts(self) -> Any:
        """Return this rank's segment."""
        return self.window.array

    def step(self) -> None:
        """Move both faces."""
        self._kernel(*self._launch, self._arguments)

    def check_around(self, step: Callable[[], None], token: int) -> None:
        """Do a step between two fences: by itself it has no order between the ranks."""
        self.fill(token)
        self.window.fence()
        step()
        self.window.fence()
        self.count(token)
        self.poison()

    def close(self) -> None:
        """Close the window, once no view of it is left."""
        self._arguments = None
        del self.to_left, self.to_right
        self.window.close()


class _Copies(_Stores):
    """Two copies of the copy engine, one after the other: one of them fills the link."""

    def prepare(self) -> None:
        """Find all that the calls take. Local."""
        ring = self.ring
        self._memcpy = ring.node.xp.cuda.runtime.memcpyAsync
        stream = int(ring.session.stream.ptr)
        self._calls = [
            (int(to.data.ptr), int(face.data.ptr), int(face.nbytes), _DEVICE_TO_DEVICE, stream)
            for to, face in ((self.to_left, self.faces[LEFT]), (self.to_right, self.faces[RIGHT]))
        ]

    def step(self) -> None:
        """Move both faces."""
        for words in self._calls:
            self._memcpy(*words)


class _Launch(RingArm):
    """An empty kernel: there is nothing to check."""

    moves = False

    def __init__(self, ring: Ring) -> None:
        super().__init__(ring)
        self._kernel = _kernel(ring, "nothing")

    def step(self) -> None:
        """Launch it."""
        self._kernel((1,), (1,), ())

    def check_around(self, step: Callable[[], None], token: int) -> None:  # noqa: ARG002
        """Launch it."""
        step()


class _Hop(RingArm):
    """A number to both neighbors, and theirs back; checked by the numbers that came."""

    moves = False

    def __init__(self, ring: Ring) -> None:
        super().__init__(ring)
        node = ring.node
        self._window = node.allocate_each((2, _FLAG_WORDS), "u8", fill=0)
        self._launches = node.xp.zeros(1, "u8")
        self._arguments: Any = (
            self._window.segment(ring.left)[RIGHT],
            self._window.segment(ring.right)[LEFT],
            self._window.array,
            self._launches,
        )
        self._kernel = _kernel(ring, "hop")

    def step(self) -> None:
        """Tell and wait."""
        self._kernel((1,), (1,), self._arguments)

    def check_around(self, step: Callable[[], None], token: int) -> None:  # noqa: ARG002
        """Tell and wait; the kernel counts by itself."""
        step()

    def wrong(self) -> int:
        """Return how many neighbors have told less than this rank; waits for the GPU."""
        return int((self._window.array[:, 0] < self._launches).sum())

    def close(self) -> None:
        """Close the window, once no view of it is left."""
        self._arguments = None
        self._window.close()

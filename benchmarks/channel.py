"""Case ``channel``: frames from the leader of each node to one consumer, which only looks at them.

The baselines are what one writes without channels: as many windows as the channel has slots, in
turn, in a loop of `start` and `complete` with `wait` and `post`; and a message, on CUDA through
pinned host memory.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from mpishare.bench.cases import Case
from mpishare.bench.check import Pattern
from mpishare.bench.comparison import Comparison, Variant
from mpishare.bench.session import Session

#: No fewer than checked steps are made between two agreements: a frame is verified after its block.
_SLOTS = 4
#: Frames of memory of a rank, at most: two rings, the source, the pattern's, and the message's.
_FRAMES = 2 * _SLOTS + 5


def run(session: Session, case: Case) -> None:
    for nbytes in session.sizes(case, _FRAMES):
        unfit = session.too_few_ranks("a channel")
        comparison = Comparison(session, case, nbytes=nbytes, sent_nbytes=nbytes, unfit=unfit)
        comparison.add("channel", partial(_Channel, session, nbytes))
        comparison.add_baselines("window", {"window": partial(_Windows, session, nbytes)})
        comparison.add_baselines("send", {"send": partial(_Messages, session, nbytes)})
        comparison.run()


class _Stream(Variant):
    """The leader sends what it copies from its source, one consumer receives, the others watch."""

    def __init__(self, session: Session, nbytes: int) -> None:
        self.session, self.node = session, session.node
        self.words = nbytes // 8
        self.producer = self.node.leader
        self.consumer = (self.producer + 1) % self.node.size
        self.check = Pattern(self.node.xp, self.words)
        self.source: Any = self.node.xp.zeros(self.words, "u8")
        self.received = self.source
        self.copyto = self.node.xp.copyto

    def step(self) -> None:
        if self.node.rank == self.producer:
            self.send()
        elif self.node.rank == self.consumer:
            self.receive()

    def send(self) -> None:
        raise NotImplementedError

    def receive(self) -> None:
        raise NotImplementedError

    def fill(self, token: int) -> None:
        if self.node.rank == self.producer:
            self.check.fill(self.source, self.producer, 0, token)

    def verify(self, token: int) -> None:
        if self.node.rank == self.consumer:
            self.check.verify(self.received, self.producer, 0, token)


class _Channel(_Stream):
    """As a user would write it."""

    def __init__(self, session: Session, nbytes: int) -> None:
        super().__init__(session, nbytes)
        self.channel = self.node.channel(
            self.words, "u8", slots=_SLOTS, producer=self.producer, consumers=[self.consumer]
        )

    def send(self) -> None:
        with self.channel.put() as slot:
            self.copyto(slot, self.source)

    def receive(self) -> None:
        with self.channel.get() as slot:
            self.received = slot

    def close(self) -> None:
        self.received = self.source
        self.channel.close()


class _Windows(_Stream):
    """The same ring by hand: a window for each slot, all of them posted at the beginning."""

    def __init__(self, session: Session, nbytes: int) -> None:
        super().__init__(session, nbytes)
        allocate = partial(self.node.allocate, self.words, "u8", owner=self.consumer)
        self.windows = [allocate() for _ in range(_SLOTS)]
        self.arrays = [window.array for window in self.windows]
        self.peer = [self.consumer if self.node.rank == self.producer else self.producer]
        self.turn = 0
        if self.node.rank == self.consumer:
            for window in self.windows:
                window.post(self.peer)

    def send(self) -> None:
        window, array = self.windows[self.turn], self.arrays[self.turn]
        window.start(self.peer)
        self.copyto(array, self.source)
        window.complete()
        self.turn = (self.turn + 1) % _SLOTS

    def receive(self) -> None:
        window, self.received = self.windows[self.turn], self.arrays[self.turn]
        window.wait()
        window.post(self.peer)
        self.turn = (self.turn + 1) % _SLOTS

    def close(self) -> None:
        self.received = self.source
        self.arrays.clear()
        for window in self.windows:
            window.close()


class _Messages(_Stream):
    """A blocking message; on CUDA from and to pinned memory, where the GPU is waited for."""

    def __init__(self, session: Session, nbytes: int) -> None:
        super().__init__(session, nbytes)
        self.comm = self.node.comm
        self.received = self.node.xp.zeros(self.words, "u8")
        self.sent, self.landed = self.source, self.received
        if session.on_cuda:
            import cupyx

            self.sent = self.landed = cupyx.zeros_pinned(self.words, "u8")

    def send(self) -> None:
        if self.session.on_cuda:
            self.source.get(out=self.sent)
        self.comm.Send(self.sent, self.consumer)

    def receive(self) -> None:
        self.session.synchronize()
        self.comm.Recv(self.landed, self.producer)
        if self.session.on_cuda:
            self.received.set(self.landed)

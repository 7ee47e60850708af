"""Every order in which the streams of ranks may run: calls that take turns lose no cells.

A model of the memory, with the operations that `Handshake` enqueues. A stream runs them in order,
and the streams of all ranks in any order that the flags allow.
"""

from random import Random

import pytest

from mpishare.plans.gpu.flags import Handshake

EPOCHS = 6


class Flags:
    """The flags of one rank: an address is what it stands for."""

    def __init__(self, rank, streamed):
        self.rank, self.streamed = rank, streamed

    def ready(self, sender, receiver):
        return "ready", sender, receiver

    def seen(self, receiver, sender):
        return "seen", receiver, sender


class Backend:
    """Collects what is enqueued on a stream, which is a list here."""

    def signals(self, operations):
        return Enqueued(operations)


class Enqueued:
    def __init__(self, operations):
        self.operations = operations

    def enqueue(self, stream, values):
        stream += [(*each, value) for each, value in zip(self.operations, values, strict=True)]


def calls(rank, peers):
    """The stream of a rank that makes calls: a pack, the signals, an unpack."""
    stream = []
    handshake = Handshake(Backend(), Flags(rank, peers))
    for epoch in range(1, EPOCHS + 1):
        stream.append(("pack", None, epoch))
        handshake.ready.enqueue(stream)
        handshake.seen.enqueue(stream)
        stream.append(("unpack", None, epoch))
    return stream


def run(sends, neighbors, seed, *, buffers=2):
    """Run the streams of all ranks; return why they are wrong, None if they are right."""
    random = Random(seed)
    streams = [calls(rank, peers) for rank, peers in enumerate(neighbors)]
    flags = {("seen", a, b): 1 for a, peers in enumerate(neighbors) for b in peers}
    packed = {}
    while any(streams):
        able = [
            (rank, stream)
            for rank, stream in enumerate(streams)
            if stream and (stream[0][0] != "wait" or flags.get(stream[0][1]))
        ]
        if not able:
            return "deadlock"
        rank, stream = random.choice(able)
        kind, flag, value = stream.pop(0)
        if kind == "write":
            flags[flag] = value
        elif kind == "pack":
            packed.update(((rank, peer, value % buffers), value) for peer in sends[rank])
        elif kind == "unpack":
            sources = [source for source, to in enumerate(sends) if rank in to]
            if any(packed.get((source, rank, value % buffers)) != value for source in sources):
                return "lost cells"
    return None


RING = [[3, 1], [0, 2], [1, 3], [2, 0]]
PLANS = {
    "two ranks": ([[1], [0]], [[1], [0]]),
    "a ring": (RING, RING),
    "one way": ([[1], [2], []], [[1], [0, 2], [1]]),
    "a gather": ([[], [0], [0]], [[1, 2], [0], [0]]),
    "all": ([[1, 2], [0, 2], [0, 1]],) * 2,
}
SEEDS = range(300)


@pytest.mark.parametrize("plan", PLANS)
def test_no_order_of_the_streams_loses_a_cell(plan):
    assert [run(*PLANS[plan], seed) for seed in SEEDS] == [None for _ in SEEDS]


@pytest.mark.parametrize("plan", PLANS)
def test_one_buffer_would_not_do(plan):
    assert "lost cells" in [run(*PLANS[plan], seed, buffers=1) for seed in SEEDS]

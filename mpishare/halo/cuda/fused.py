"""Route ``fused``: one launch for all such neighbors, faces and fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from mpishare.backends.driver import Launch, Replay
from mpishare.halo.cuda.fast_path import key_of
from mpishare.halo.cuda.resources import THREADS
from mpishare.halo.cuda.work_items import GET_LL, LOCAL, PACK, PUT_LL, UNPACK, WorkList
from mpishare.ordering.stream_chain import StreamChain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.halo.cuda.resources import PlanResources


_BESIDE = 2
_BESIDE_THREADS = 256
_MOST_REPLAYS = 16
_MOST_SEEN = 1024


class Fused:
    """The launch that moves everything between this rank and its fused neighbors. Local.

    Parameters
    ----------
    resources : PlanResources
        The plan's.
    most : sequence of int, bytes
        For each field, what its address is a multiple of.
    capturing : int
        A stream on which launches may be captured.
    """

    def __init__(self, resources: PlanResources, most: Sequence[int], capturing: int) -> None:
        mine, rank = resources.mine, resources.rank
        table, words = WorkList(resources.layouts, most, resources.upload), resources.words
        for message in resources.sends:
            if mine[message.peer] != "fused":
                continue
            for part in message.parts:
                flags = resources.flags(rank, message.peer, message.tag, part.field)
                packed = resources.outgoing(message, part)
                kind, turn = PUT_LL if flags is None else PACK, resources.turn(message.peer)
                shares_gpu = resources.shares_gpu(message.peer)
                table.move(kind, part, packed, turn, flags, shares_gpu=shares_gpu)
        for peer in resources.fused_peers:
            for flag in resources.flags(rank, peer, -1, -1) or ():
                table.signal(PACK, flag)
        # What stays on this rank goes along, and saves a launch.
        for message, target in resources.local():
            for part, other in zip(message.parts, target.parts, strict=True):
                table.move(LOCAL, part, 0, target=other)
        for peer in resources.fused_peers:
            for flag in resources.flags(peer, rank, -1, -1) or ():
                table.signal(UNPACK, flag, words.late(peer))
        for message in resources.recvs:
            if mine[message.peer] != "fused":
                continue
            for part in message.parts:
                flags = resources.flags(message.peer, rank, message.tag, part.field)
                packed = resources.incoming(message, part)
                kind, turn = GET_LL if flags is None else UNPACK, resources.turn(rank)
                late, shares_gpu = words.late(message.peer), resources.shares_gpu(message.peer)
                table.move(kind, part, packed, turn, flags, late=late, shares_gpu=shares_gpu)
        loaded = table.load()

        def ways(blocks: int, threads: int) -> GraphCache:
            rest = resources.state("fused"), words.ended
            launch = resources.launch("fused", loaded, *rest, blocks=blocks, threads=threads)
            return GraphCache(resources, launch, capturing)

        blocks = resources.most_blocks
        self.alone = ways(blocks, THREADS)
        # Beside other work fewer blocks fill the links as well, and leave it room.
        self.beside = ways(max(1, blocks // _BESIDE), _BESIDE_THREADS)

    def close(self) -> None:
        """Destroy the graphs. Local."""
        self.alone.close()
        self.beside.close()


class GraphCache:
    """One launch, and graphs of it for fields that come back.

    Parameters
    ----------
    resources : PlanResources
        The plan's.
    launch : Launch
        Of the kernel.
    capturing : int
        A stream on which it may be captured.
    """

    def __init__(self, resources: PlanResources, launch: Launch, capturing: int) -> None:
        self._pointers = resources.pointers
        self._launch = launch
        self._capturing = capturing
        self._where = resources.where
        self._seen: set[tuple[int, ...]] = set()
        self._replays: dict[tuple[int, ...], Replay] = {}
        self.told: dict[Any, int] = {}
        """The handles of the graphs there are by `key_of`, for whoever launches them itself."""

    def enqueue(self, number: int, places: tuple[int, ...], *, is_captured: bool) -> None:
        """Put it on a stream, for fields at these addresses."""
        replay = self._replays.get(places)
        if replay is not None and not is_captured:
            replay.enqueue(number)
            return
        self._pointers[:] = [*places]
        if places in self._seen and not is_captured:
            if len(self._replays) == _MOST_REPLAYS:
                oldest = next(iter(self._replays))
                self.told.pop(key_of(oldest))
                self._replays.pop(oldest).close()
            replay = self._replays[places] = Replay(self._launch, self._capturing, self._where)
            self.told[key_of(places)] = replay.handle
            replay.enqueue(number)
            return
        self._launch.enqueue(number)
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen.add(places)

    def close(self) -> None:
        """Destroy the graphs. Local."""
        for replay in self._replays.values():
            replay.close()
        self._replays = {}


class LaunchOrder:
    """The fused kernels of all plans of this process on one GPU, in the order of the calls.

    They wait for those of other ranks while they hold a part of the GPU. On streams of their own,
    two plans could each fill one GPU and wait for the other on the next; the order of the calls is
    the same on all ranks. One plan alone needs no order: another is made only when all is over.

    Attributes
    ----------
    plans : int
        How many there are.
    """

    _all: ClassVar[dict[int, LaunchOrder]] = {}

    def __init__(self, backend: Any) -> None:
        self.chain = StreamChain(backend, "fused kernels")
        self.plans = 0

    @classmethod
    def on(cls, backend: Any) -> LaunchOrder:
        """Return those of a backend's GPU, with one more plan."""
        turns = cls._all.setdefault(backend.device.ordinal, cls(backend))
        turns.plans += 1
        return turns

    def leave(self) -> None:
        """Count one plan less; all that was put on streams is over."""
        self.plans -= 1
        self.chain.end()

"""Route ``fused``: one launch for all such neighbors, faces and fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.backends.driver import Launch, Replay
from mpishare.halo.known import key_of
from mpishare.halo.setting import THREADS
from mpishare.halo.tables import HEAR, LOCAL, PULL, PUSH, SAY, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.halo.setting import Setting


_BESIDE = 2
_BESIDE_THREADS = 256
_MOST_REPLAYS = 16
_MOST_SEEN = 1024


class Fused:
    """The launch that moves everything between this rank and its fused neighbors. Local.

    Parameters
    ----------
    setting : Setting
        The plan's.
    most : sequence of int, bytes
        For each field, what its address is a multiple of.
    capturing : int
        A stream on which launches may be captured.
    """

    def __init__(self, setting: Setting, most: Sequence[int], capturing: int) -> None:
        mine, rank = setting.mine, setting.rank
        table, words = Table(setting.layouts, most, setting.upload), setting.words
        for message in setting.sends:
            if mine[message.peer] != "fused":
                continue
            for part in message.parts:
                flags = setting.flags(rank, message.peer, message.tag, part.field)
                packed = setting.outgoing(message, part)
                kind, turn = SAY if flags is None else PUSH, setting.turn(message.peer)
                is_crowded = setting.is_crowded(message.peer)
                table.move(kind, part, packed, turn, flags, is_crowded=is_crowded)
        for peer in setting.fused_peers:
            for flag in setting.flags(rank, peer, -1, -1) or ():
                table.signal(PUSH, flag)
        # What stays on this rank goes along, and saves a launch.
        for message, target in setting.local():
            for part, other in zip(message.parts, target.parts, strict=True):
                table.move(LOCAL, part, 0, target=other)
        for peer in setting.fused_peers:
            for flag in setting.flags(peer, rank, -1, -1) or ():
                table.signal(PULL, flag, words.late(peer))
        for message in setting.recvs:
            if mine[message.peer] != "fused":
                continue
            for part in message.parts:
                flags = setting.flags(message.peer, rank, message.tag, part.field)
                packed = setting.incoming(message, part)
                kind, turn = HEAR if flags is None else PULL, setting.turn(rank)
                late, is_crowded = words.late(message.peer), setting.is_crowded(message.peer)
                table.move(kind, part, packed, turn, flags, late=late, is_crowded=is_crowded)
        loaded = table.load()

        def ways(blocks: int, threads: int) -> Ways:
            rest = setting.state("fused"), words.ended
            launch = setting.launch("fused", loaded, *rest, blocks=blocks, threads=threads)
            return Ways(setting, launch, capturing)

        blocks = setting.most_blocks
        self.alone = ways(blocks, THREADS)
        # Beside other work fewer blocks fill the links as well, and leave it room.
        self.beside = ways(max(1, blocks // _BESIDE), _BESIDE_THREADS)

    def close(self) -> None:
        """Destroy the graphs. Local."""
        self.alone.close()
        self.beside.close()


class Ways:
    """One launch, and graphs of it for fields that come back.

    Parameters
    ----------
    setting : Setting
        The plan's.
    launch : Launch
        Of the kernel.
    capturing : int
        A stream on which it may be captured.
    """

    def __init__(self, setting: Setting, launch: Launch, capturing: int) -> None:
        self._pointers = setting.pointers
        self._launch = launch
        self._capturing = capturing
        self._where = setting.where
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

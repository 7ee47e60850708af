"""What the routes on CUDA share: words, staging, tables in GPU memory, messages."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from mpishare.backends import driver
from mpishare.halo.cuda.flags import PinnedFlags
from mpishare.halo.cuda.kernels import kernel
from mpishare.halo.cuda.staging import DeviceStaging, pinned_of, slab_of
from mpishare.halo.mpi_route import MpiMessages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpishare.halo.engine import PlanSetup
    from mpishare.halo.message import Message, Part

THREADS = 512
_BLOCKS_EACH = 2  # blocks a multiprocessor: enough to fill the links, and room for others
_CROWDED_DEPTH = 4


class PlanResources:
    """Everything of one direction of a plan but the order of its launches. Collective to make.

    Parameters
    ----------
    setup, sends, recvs, is_reverse
        As `HostEngine`.
    """

    def __init__(
        self,
        setup: PlanSetup,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        *,
        is_reverse: bool,
    ) -> None:
        ranks, name = setup.comm, setup.name
        self.ranks, self.rank, self.layouts = ranks, ranks.rank, setup.mine
        self.sends, self.recvs, self.is_reverse = sends, recvs, is_reverse
        self.backend: Any = ranks.context.backend
        self.where = f"{name}, rank {ranks.rank} of {ranks.size}"
        self._name = name
        uuids = ranks.context.uuids
        self._sharing = uuids.count(uuids[ranks.context.rank])
        self._crowded = {
            r for r, place in ranks.ranks_here.items() if uuids.count(uuids[place]) > 1
        }
        self._held: list[Any] = []

        def way(rank: int, peer: int, route: str) -> str:
            if is_reverse:
                # Sums keep an order, for which a kernel that waits for others would have to wait.
                return "copy" if route == "fused" else route
            return "local" if route == "copy" and peer == rank else route

        self.routes = [
            {peer: way(rank, peer, route) for peer, route in each.items()}
            for rank, each in enumerate(setup.routes)
        ]
        self.mine = self.routes[ranks.rank]
        said = [
            [(peer, tag, parts, self.routes[rank][peer]) for peer, tag, parts, _ in each]
            for rank, each in enumerate(setup.recvs if is_reverse else setup.sends)
        ]
        ranks_here = list(ranks.ranks_here)
        near = [p for p, r in self.mine.items() if r in ("fused", "copy") and p != ranks.rank]
        self._slabs = {
            r: slab_of(said, self.routes, setup.units, ranks_here, r, self._crowded)
            for r in {ranks.rank, *near}
        }
        self._pinned, pinned_nbytes = pinned_of(said, ranks_here)
        relayed = {p for p, r in self.mine.items() if r in ("copy", "pinned") and p != ranks.rank}
        nbytes = {rank: slab.nbytes for rank, slab in self._slabs.items()}
        self.words = PinnedFlags(ranks, pinned_nbytes, relayed)
        self.slabs = DeviceStaging(ranks, name, nbytes, near)
        self.mail: MpiMessages | None = None
        try:
            self._share()
        except BaseException:
            self.undo(name)
            raise
        self.pointers = (ctypes.c_uint64 * len(setup.mine))()
        self.has_fused = "fused" in self.mine.values()
        # Of a plan that is all fused nothing but that one launch is left.
        self.is_relayed = not self.has_fused or bool(set(self.mine.values()) - {"fused", "local"})
        self.fused_peers = [peer for peer, route in self.mine.items() if route == "fused"]
        self._buffers: dict[tuple[str, int, int], int] = {}
        self._mail_nbytes = 0
        self._states: dict[str, int] = {}
        self.packed: Any = None  # event: the outgoing messages are packed
        self.taken: Any = None  # event: the incoming messages are unpacked

    def _share(self) -> None:
        """Make what the ranks have in common: each step costs a word from all of them."""
        step, words, slabs = self.ranks.step, self.words, self.slabs

        def create() -> str:
            words.common.create()
            return slabs.create()

        def attach() -> None:
            words.attach(names)
            slabs.open(handles)

        try:
            handles: list[str] = step(self._name, create)
            names: list[str] = step(self._name, words.common.publish)
            step(self._name, attach)
        finally:
            words.common.forget()

    @property
    def staging_nbytes(self) -> int:
        """Bytes of this rank's slab, its buffers for messages, and what the node has in common."""
        return self.slabs.nbytes + self._mail_nbytes + self.words.nbytes

    def prepare(self) -> None:
        """Make the buffers of the messages that go by MPI, and what says when they are free."""
        outgoing = [m for m in self.sends if self.mine[m.peer] == "mpi"]
        incoming = [m for m in self.recvs if self.mine[m.peer] == "mpi"]
        if outgoing or incoming:
            # One pair for all launches, whatever fields they are for: the buffers are the same.
            self.packed, self.taken = self.backend.local_event(), self.backend.local_event()
            self.mail = MpiMessages(
                self.ranks,
                self._name,
                outgoing,
                incoming,
                [self._buffer("out", message) for message in outgoing],
                [self._buffer("in", message) for message in incoming],
            )

    def upload(self, data: np.ndarray[Any, Any] | bytes) -> int:
        """Copy an array or bytes to the GPU and return the address there; held. Local."""
        whole = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
        copied = cupy.asarray(np.ascontiguousarray(whole).view(np.uint8).reshape(-1))
        self._held.append(copied)
        return int(copied.data.ptr)

    def shares_gpu(self, peer: int) -> bool:
        """Whether this rank or a peer shares its GPU with other ranks of the node."""
        return self.rank in self._crowded or peer in self._crowded

    def launch(
        self,
        name: str,
        table: tuple[int, int],
        *rest: int,
        blocks: int = 0,
        threads: int = THREADS,
    ) -> driver.Launch:
        """Prepare the launch of a kernel on a table; `rest` are further addresses. Local."""
        items, count = table
        device = self.backend.device.ordinal
        depth = _CROWDED_DEPTH if self._sharing > 1 else 1
        function = kernel(name, len(self.layouts), depth, device)
        arguments = [
            self.pointers,
            ctypes.c_uint64(items),
            ctypes.c_uint32(count),
            *map(ctypes.c_uint64, rest),
        ]
        grid = max(1, min(count, blocks or self.most_blocks))
        return driver.Launch(function, grid, threads, arguments, self.where)

    def state(self, name: str) -> int:
        """Return the address of a kernel's own words, which stay from launch to launch. Local."""
        if name not in self._states:
            self._states[name] = self.upload(np.zeros(2, np.uint64))
        return self._states[name]

    def local(self) -> Iterator[tuple[Message, Message]]:
        """Yield what this rank sends to itself, each with what it receives then."""
        if self.mine.get(self.rank) == "local":
            to = {message.tag: message for message in self.recvs if message.peer == self.rank}
            for message in self.sends:
                if message.peer == self.rank:
                    yield message, to[message.tag]

    def warm(self) -> None:
        """Launch each kernel on nothing: what is loaded later waits for what streams wait for."""
        empty, state = self.upload(np.zeros(256, np.uint8)), self.state("warm")
        rest: dict[str, tuple[int, ...]] = {}
        if self.has_fused:
            rest["fused"] = state, empty
        if self.is_relayed:
            rest["relay"] = state, 0
        if self.is_reverse:
            rest["add"] = ()
        for name, arguments in rest.items():
            self.launch(name, (empty, 0), *arguments).enqueue(0)

    def load(self) -> None:
        """Wait until all that was copied is there, and all else is over. Local."""
        self.ranks.context.drain(self._name)

    def outgoing(self, message: Message, part: Part) -> int:
        """Return where a part of a message is packed to, as this rank's GPU sees it."""
        peer, key = message.peer, (self.rank, message.tag, part.field)
        route = self.mine[peer]
        if route == "mpi":
            return self._buffers["out", peer, message.tag] + message.offset_of(part)
        if route == "pinned":
            return self.words.behind + self._pinned[peer, key]
        slab = self._slabs[peer]
        inside = slab.fused[key] if route == "fused" else slab.copied[key]
        return self.slabs.address_of(peer) + inside

    def incoming(self, message: Message, part: Part) -> int:
        """Return where a part of a message comes in packed."""
        peer, key = message.peer, (message.peer, message.tag, part.field)
        route = self.mine[peer]
        if route == "mpi":
            return self._buffers["in", peer, message.tag] + message.offset_of(part)
        if route == "pinned":
            return self.words.behind + self._pinned[self.rank, key]
        slab = self._slabs[self.rank]
        inside = slab.fused[key] if route == "fused" else slab.copied[key]
        return self.slabs.address_of(self.rank) + inside

    def turn(self, receiver: int) -> int:
        """Return how far the second copy of fused cells is from the first, on their receiver."""
        return self._slabs[receiver].turn

    def flags(self, sender: int, receiver: int, tag: int, field: int) -> list[int] | None:
        """Return where the flags of a fused part are, or of a sender of nothing (-1, -1).

        None for a part that travels as words, and for a sender of something.
        """
        flags = self._slabs[receiver].flags.get((sender, tag, field))
        if flags is None:
            return None
        base = self.slabs.address_of(receiver)
        return [base + flag for flag in flags]

    def release(self) -> None:
        """Let go of what this rank imported. Local."""
        self.slabs.release()

    def close(self) -> None:
        """Free what this rank owns. Local, once all have released."""
        self.slabs.close()
        self.words.close()
        self._close_mail()
        self._held = []

    def undo(self, call: str) -> None:
        """Free everything after a failure that all ranks know of. Collective."""
        self._close_mail()
        self.ranks.step(call, self.slabs.release)
        self.slabs.close()
        self.words.close()

    def _close_mail(self) -> None:
        if self.mail is not None:
            self.mail.close()
            self.backend.close_events([self.packed, self.taken])

    def _buffer(self, way: str, message: Message) -> np.ndarray[Any, Any]:
        pinned = cupy.cuda.alloc_pinned_memory(max(message.nbytes, 1))
        self._held.append(pinned)
        self._buffers[way, message.peer, message.tag] = int(pinned.ptr)
        self._mail_nbytes += message.nbytes
        return np.frombuffer(pinned, np.uint8, message.nbytes)

    @property
    def most_blocks(self) -> int:
        """Blocks of a launch, so that those of all ranks that are on a GPU at once fit there."""
        count = int(cupy.cuda.runtime.deviceGetAttribute(16, self.backend.device.ordinal))
        if self._sharing == 1 or not self.backend.device.mps:
            # Alone, or in turns with others, of which each has the whole GPU.
            return _BLOCKS_EACH * count
        # Those that wait never have blocks on every multiprocessor, whoever they wait for. Four
        # ranks with half a block for each, which is half of what fits, were seen to wait for one
        # whose kernel was not let in.
        return max(1, count // self._sharing)

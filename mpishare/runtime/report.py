"""The report of a node: which ranks share memory, by which route, and why where not."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

from mpishare.errors import counted, grouped, name_ranks
from mpishare.runtime.route import COPY, FUSED, HOST, MESSAGES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mpishare.backends import Device

_NO_CMA = (
    "so large faces of arrays in no window are copied twice. Start containers with --pid=host "
    "--userns=host --cap-add=SYS_PTRACE; outside of them kernel.yama.ptrace_scope=0 allows it"
)


@dataclass(frozen=True)
class Pair:
    """How one rank reaches the memory of another, as found by the live probe.

    Attributes
    ----------
    origin, target : int
        Ranks in ``node.comm``: the one that reaches, the one whose memory is reached.
    memory : bool
        The target's memory could be mapped.
    copy, kernel : bool
        A copy, and a kernel's store, arrived there.
    counters : bool
        A counter written on the origin's stream let the target's stream go on.
    link : str
        ``self``, ``same GPU``, ``NVLink``, ``PCIe``, ``peer`` (a GPU that this process does not
        see) or ``host memory``.
    route : str
        How a halo would travel: ``fused``, ``copy``, ``pinned`` or ``host``.
    reason : str or None
        Why a part of this does not work.
    """

    origin: int
    target: int
    memory: bool
    copy: bool
    kernel: bool
    counters: bool
    link: str
    route: str
    reason: str | None

    @property
    def events(self) -> bool:
        """Whether a stream can wait for an event of the target: it waits for a counter."""
        return self.counters


def host_pairs(size: int) -> tuple[Pair, ...]:
    """Describe a node on the host backend: its control block is mapped by all, so all share."""
    return tuple(
        Pair(
            origin=origin,
            target=target,
            memory=True,
            copy=True,
            kernel=False,
            counters=True,
            link="self" if origin == target else "host memory",
            route=HOST,
            reason=None,
        )
        for origin, target in product(range(size), repeat=2)
    )


@dataclass(frozen=True)
class Member:
    """One rank of a node: its rank there and in the given communicator, its process, its GPU."""

    rank: int
    given_rank: int
    host: str
    pid: int
    device: Device | None


def time_sliced_gpus(members: Sequence[Member]) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that several ranks share without the Multi-Process Service."""
    devices = [member.device for member in members if member.device is not None]
    uuids = [device.uuid for device in devices]
    without = {device.uuid for device in devices if not device.mps}
    return tuple(sorted(uuid for uuid in without if uuids.count(uuid) > 1))


@dataclass(frozen=True)
class Report:
    """Backend, ranks and routes of a node, and why they are so. ``str()`` is a text for people.

    Attributes
    ----------
    backend : str
        ``"cuda"`` or ``"host"``.
    why_host : str or None
        Why it is not ``"cuda"``.
    leader : int
        In ``node.comm``.
    members : tuple of Member
        By rank in ``node.comm``.
    pairs : tuple of Pair
        Every rank with every rank, itself included.
    notes : tuple of str
        Advice for the user.
    gpu_messages : str or None
        Why messages to other nodes cannot go out of GPU memory; empty if they can, None before
        the first plan on GPUs that has any.
    native_missing : str or None
        Why halo exchanges and fences on the host are made in Python, by which ranks if not by all;
        None if they are made in C, and on CUDA.
    unreadable : tuple of (int, int, str)
        A rank, one whose process memory it cannot read (CMA), and why.
    """

    backend: str
    why_host: str | None
    leader: int
    members: tuple[Member, ...]
    pairs: tuple[Pair, ...]
    notes: tuple[str, ...]
    gpu_messages: str | None = None
    native_missing: str | None = None
    unreadable: tuple[tuple[int, int, str], ...] = ()

    @property
    def can_share(self) -> bool:
        """Whether any two ranks of the node share memory; True for a node of one rank."""
        others = [pair for pair in self.pairs if pair.origin != pair.target]
        return not others or any(pair.memory for pair in others)

    @property
    def host_code(self) -> str | None:
        """The code of halo exchanges and fences on the host; None on CUDA.

        ``"compiled"`` if all ranks have it, else ``"python"``.
        """
        if self.backend != "host":
            return None
        return "compiled" if self.native_missing is None else "python"

    @cached_property  # each `Node.launch` reads it
    def time_sliced_gpus(self) -> tuple[str, ...]:
        """UUIDs of the GPUs that several ranks share without the Multi-Process Service."""
        return time_sliced_gpus(self.members)

    def why(self, origin: int, target: int | None, route: str) -> str | None:
        """Return why cells take a route between two ranks; None for the fastest.

        ``target`` is None for a rank on another node.
        """
        if target is None:
            is_staged = self.gpu_messages and route == MESSAGES
            return "another node" + f", through host memory: {self.gpu_messages}" * bool(is_staged)
        if route in (FUSED, HOST):
            return None
        pairs = [pair for pair in self.pairs if {pair.origin, pair.target} == {origin, target}]
        if route not in {pair.route for pair in pairs}:
            return "MPISHARE_ROUTE asks for it"
        if route == COPY:
            shared = "a GPU is shared without the Multi-Process Service"
            return "myself" if origin == target else shared
        return next(filter(None, (pair.reason for pair in pairs)), None)

    def describe_routes(
        self, ranks_here: Mapping[int, int], rank: int, routes: Mapping[int, str]
    ) -> str:
        """Name the routes of one rank of a plan, each with the reason of `why`.

        `ranks_here` has the plan's ranks on this node, each with its rank in the node; `rank` is
        one of the plan, `routes` are by its peers.
        """
        texts = []
        for peer, route in sorted(routes.items()):
            why = self.why(ranks_here[rank], ranks_here.get(peer), route)
            texts.append(f"rank {peer} by {route}" + (f" ({why})" if why else ""))
        return ", ".join(texts) or "no neighbors"

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {**asdict(self), "can_share": self.can_share, "host_code": self.host_code}

    def __str__(self) -> str:
        """Write the report for people."""
        lines = [
            *map(self._describe_member, self.members),
            *self._describe_devices(),
            *self._describe_gpu_memory(),
            *self._describe_pairs(),
            *self._describe_host(),
            *self.notes,
        ]
        return "\n  ".join([self._title(), *lines])

    def _title(self) -> str:
        count = counted(len(self.members), "rank")
        why = f" ({self.why_host})" if self.why_host else ""
        return f"node {self.members[0].host}: {count}, backend {self.backend}{why}"

    def _describe_member(self, member: Member) -> str:
        role = ", leader" if member.rank == self.leader else ""
        is_same = member.given_rank == member.rank
        given = "" if is_same else f" (rank {member.given_rank} of all nodes)"
        gpu, device = "", member.device
        if device is not None:
            gpu = f", GPU {device.ordinal} {device.uuid[:12]} {device.name} at {device.pci_id}"
            gpu += ", MPS" if device.mps else ""
        return f"rank {member.rank}{given}, pid {member.pid}{gpu}{role}"

    def _describe_gpu_memory(self) -> Iterator[str]:
        if self.gpu_messages is not None:
            why = self.gpu_messages
            how = f"through host memory: {why}" if why else "out of GPU memory"
            yield f"messages to other nodes go {how}"

    def _describe_pairs(self) -> Iterator[str]:
        count = len(self.members)
        yield "from \\ to " + "".join(f"{rank:>12}" for rank in range(count))
        for origin in range(count):
            cells = [pair for pair in self.pairs if pair.origin == origin]
            links = (pair.link if pair.memory else "-" for pair in cells)
            yield f"{origin:>9} " + "".join(f"{link:>12}" for link in links)
        yield from sorted(
            {
                f"rank {pair.origin} to rank {pair.target}: {pair.reason}"
                for pair in self.pairs
                if pair.reason
            }
        )

    def _describe_host(self) -> Iterator[str]:
        if self.host_code is not None:
            why = self.native_missing
            how = "compiled C" if why is None else f"Python, which is slower: {why}"
            yield f"halo exchanges and fences on the host are made by {how}"
        if self.unreadable:
            reader, owner, why = self.unreadable[0]
            others = len(self.unreadable) - 1
            more = f" and {counted(others, 'more pair')}" if others else ""
            yield f"no CMA: rank {reader} cannot read memory of rank {owner}{more}: {why}"
            yield _NO_CMA

    def _describe_devices(self) -> list[str]:
        """Return a line for each kind of driver and GPU, with its ranks."""
        devices = [(member.device, member.rank) for member in self.members]
        kinds = grouped(
            (f"driver {device.driver}, compute capability {device.compute_capability}", rank)
            for device, rank in devices
            if device is not None
        )
        return [f"GPU of {name_ranks(ranks)}: {text}" for text, ranks in kinds.items()]

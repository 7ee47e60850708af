"""The layout of the staging buffers of a node's GPUs, computed alike at both ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpishare.plans.exchange.cuda.work_items import chunks, uses_ll
from mpishare.plans.message import MessageInfo, PartKey, padded, parts_sent
from mpishare.runtime.route import COPY, FUSED, PINNED

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from mpishare.runtime.route import Route

    Messages = Sequence[Sequence[MessageInfo]]

_FLAG_NBYTES = 32
_ALIGN = 128


@dataclass
class StagingLayout:
    """Offsets in the staging buffer into which one rank receives, in its own GPU memory."""

    # Of each chunk of a fused part too large for LL; one flag for a fused neighbor without parts.
    flags: dict[PartKey, list[int]] = field(default_factory=dict)
    # Of the flags for which this rank waits before it stores into ghosts.
    ready: dict[PartKey, int] = field(default_factory=dict)
    parts: dict[PartKey, int] = field(default_factory=dict)  # in the first of two buffers
    parity_offset: int = 0  # from the first buffer to the second
    nbytes: int = 0

    def place(self, sizes: Mapping[PartKey, int], begin: int = 0) -> None:
        """Place parts of these sizes in two buffers, from `begin` to the end."""
        at = begin
        for key, nbytes in sizes.items():
            self.parts[key] = at
            at += padded(nbytes)
        self.parity_offset = padded(at - begin, _ALIGN)
        self.nbytes = begin + 2 * self.parity_offset


def silent_key(sender: int, receiver: int) -> PartKey:
    """Return the key of the flag of a fused neighbor that sends no part."""
    return PartKey(sender, receiver, -1, -1, -1)


def staging_layout(
    messages: Messages,
    routes: Sequence[Mapping[int, Route]],
    ranks_here: Sequence[int],
    rank: int,
    sharing: Container[int] = (),
    direct: Iterable[PartKey] = (),
) -> StagingLayout:
    """Return the layout of the staging buffer of `rank`, the receiver. Pure integers."""
    fused, copied = (_sizes(messages, ranks_here, route, {rank}) for route in (FUSED, COPY))
    layout = StagingLayout()
    neighbors = [sender for sender in ranks_here if routes[rank].get(sender) == FUSED]
    at = 0
    for key, count in _flag_counts(fused, neighbors, rank, sharing).items():
        layout.flags[key] = [at + _FLAG_NBYTES * index for index in range(count)]
        at += _FLAG_NBYTES * count
    for key in direct:
        if key.sender == rank:
            layout.ready[key] = at
            at += _FLAG_NBYTES
    begin = padded(at, _ALIGN)  # the flags come first
    # An LL word is half data, half flag.
    sizes = {key: 2 * nbytes if uses_ll(nbytes) else nbytes for key, nbytes in fused.items()}
    layout.place(sizes | copied, begin)
    return layout


def _flag_counts(
    fused: Mapping[PartKey, int], neighbors: Iterable[int], rank: int, sharing: Container[int]
) -> dict[PartKey, int]:
    """Return a flag for each chunk of a part, and one for each neighbor that sends no part."""
    counts = {
        key: chunks(nbytes, shares_gpu=rank in sharing or key.sender in sharing)[0]
        for key, nbytes in fused.items()
        if not uses_ll(nbytes)
    }
    senders = {key.sender for key in fused}
    return counts | {silent_key(each, rank): 1 for each in neighbors if each not in senders}


def pinned_layout(messages: Messages, ranks_here: Sequence[int]) -> StagingLayout:
    """Return the layout of the node's pinned host memory."""
    layout = StagingLayout()
    layout.place(_sizes(messages, ranks_here, PINNED, ranks_here))
    return layout


def _sizes(
    messages: Messages, ranks_here: Iterable[int], route: Route, receivers: Container[int]
) -> dict[PartKey, int]:
    """Return the bytes of each part that these receivers get by a route."""
    parts = parts_sent(messages, ranks_here, route, receivers)
    return {key: part.nbytes for key, part in parts}

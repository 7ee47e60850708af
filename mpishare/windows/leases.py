"""The end of a door whose visitors map memory of a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishare.coordination.poll import poll

if TYPE_CHECKING:
    from mpishare.memory.door import Door

# The time that closing a window or a pool leaves to processes that map its memory on a GPU.
LET_GO_S = 3.0


def end_leases(door: Door, address: str, asked: str = "") -> list[int]:
    """Notify all visitors of an address; return the processes that hold a lease after `LET_GO_S`.

    `asked` as in `Door.leases`. Host-blocking.
    """
    door.notify(address, {"is_over": True})
    poll(lambda: not door.leases(address, asked), LET_GO_S, pause_s=0.002)
    return door.leases(address, asked)

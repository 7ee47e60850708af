"""Host memory that all ranks map: one makes it and names it, every rank opens it, the name goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare import shm

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.shm import SharedMemory

    Steps = Callable[[Callable[[], Any]], list[Any]]
    """Does some work and returns what every rank's returned, or raises on every rank."""


def map_common(step: Steps, nbytes: int, *, is_maker: bool) -> SharedMemory:
    """Map the same zeroed memory on every rank. Collective, host-blocking.

    Parameters
    ----------
    step : callable
        How the ranks agree.
    is_maker : bool
        True on the one rank that makes it.

    Returns
    -------
    SharedMemory
        With its file open. After an error on any rank nothing is left mapped.
    """
    made: list[SharedMemory] = []
    published: list[str] = []

    def create() -> None:
        if is_maker:
            made.append(shm.create(nbytes))

    def publish() -> str:
        published.extend(shm.publish(memory) for memory in made)
        return published[0] if published else ""

    def attach() -> None:
        if not made:
            made.append(shm.attach(name, nbytes))

    try:
        step(create)
        name = next(filter(None, step(publish)))
        step(attach)
    except BaseException:
        for memory in made:
            memory.close()
        raise
    finally:
        for own in published:
            shm.forget(own)
    return made[0]

"""Host memory that all ranks map: one makes it and names it, every rank opens it, the name goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare import shm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mpishare.shm import SharedMemory

    Steps = Callable[[Callable[[], Any]], list[Any]]
    """Does some work and returns what every rank's returned, or raises on every rank."""


class Common:
    """Host memory that several ranks map, made in three steps; each is done by all of them.

    Parameters
    ----------
    nbytes : int, bytes
        Of it.
    is_maker : bool
        True on the one rank that makes it.

    Attributes
    ----------
    memory : SharedMemory
        With its file open; there after `attach`.
    """

    memory: SharedMemory

    def __init__(self, nbytes: int, *, is_maker: bool) -> None:
        self._nbytes = nbytes
        self._is_maker = is_maker
        self._made: list[SharedMemory] = []
        self._published: list[str] = []

    def create(self) -> None:
        """Make it, without a name yet. Local."""
        if self._is_maker:
            self._made.append(shm.create(self._nbytes))

    def publish(self) -> str:
        """Return the name by which the others find it, on all other ranks nothing. Local."""
        self._published.extend(shm.publish(memory) for memory in self._made)
        return self._published[0] if self._published else ""

    def attach(self, told: Iterable[str]) -> None:
        """Map it, given what `publish` returned on each rank. Local."""
        if not self._made:
            self._made.append(shm.attach(next(filter(None, told)), self._nbytes))
        self.memory = self._made[0]

    def forget(self) -> None:
        """Take the name away: all have attached it, or never will. Local."""
        for own in self._published:
            shm.forget(own)

    def close(self) -> None:
        """Unmap. Local, may be repeated."""
        for memory in self._made:
            memory.close()
        self._made = []


def map_common(step: Steps, nbytes: int, *, is_maker: bool) -> SharedMemory:
    """Map the same zeroed memory on every rank. Collective, host-blocking.

    Parameters
    ----------
    step : callable
        How the ranks agree.
    nbytes, is_maker
        As `Common`.

    Returns
    -------
    SharedMemory
        With its file open. After an error on any rank nothing is left mapped.
    """
    common = Common(nbytes, is_maker=is_maker)
    try:
        step(common.create)
        told = step(common.publish)
        step(lambda: common.attach(told))
    except BaseException:
        common.close()
        raise
    finally:
        common.forget()
    return common.memory

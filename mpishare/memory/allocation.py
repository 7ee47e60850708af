"""Host memory that several ranks map, made in collective steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.errors import UnsupportedError
from mpishare.memory import shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mpishare.memory.shared import SharedMemory

    # Does some work and returns the results of all ranks, or raises on every rank.
    Steps = Callable[[Callable[[], Any]], list[Any]]


class SharedAllocation:
    """Host memory that several ranks map, made in three steps that all ranks take.

    `is_maker` is True on the one rank that allocates it. `memory` exists after `attach`, with its
    file open.
    """

    memory: SharedMemory

    def __init__(self, nbytes: int, *, is_maker: bool, is_sparse: bool = False) -> None:
        self._nbytes = nbytes
        self._is_sparse = is_sparse
        self._is_maker = is_maker
        self._made: list[SharedMemory] = []
        self._published: list[str] = []

    def create(self) -> None:
        """Allocate it, without a name yet."""
        if self._is_maker:
            self._made.append(shared.create(self._nbytes, is_sparse=self._is_sparse))

    def publish(self) -> str:
        """Return the name by which the other ranks find it; empty on these."""
        self._published.extend(shared.publish(memory) for memory in self._made)
        return self._published[0] if self._published else ""

    def attach(self, names: Iterable[str]) -> None:
        """Map it, given the names of `publish`; `UnsupportedError` if it cannot be opened."""
        if not self._made:
            try:
                self._made.append(shared.attach(next(filter(None, names)), self._nbytes))
            except PermissionError as error:
                raise UnsupportedError(
                    f"cannot open the shared memory of another rank in {shared.FOLDER}: "
                    f"{error.strerror}. All ranks of a machine must run as one user; start "
                    "containers with the same --user and --userns, and with --ipc=host."
                ) from error
        self.memory = self._made[0]

    def forget(self) -> None:
        """Remove the name: all have attached it, or never will."""
        for own in self._published:
            shared.forget(own)

    def close(self) -> None:
        """Unmap. May be repeated."""
        for memory in self._made:
            memory.close()
        self._made = []


def map_on_all_ranks(
    step: Steps, nbytes: int, *, is_maker: bool, is_sparse: bool = False
) -> SharedMemory:
    """Map the same zeroed memory on every rank. Collective, host-blocking.

    Returns it with its file open. After an error on any rank no memory is left mapped.
    """
    allocation = SharedAllocation(nbytes, is_maker=is_maker, is_sparse=is_sparse)
    try:
        step(allocation.create)
        names = step(allocation.publish)
        step(lambda: allocation.attach(names))
    except BaseException:
        allocation.close()
        raise
    finally:
        allocation.forget()
    return allocation.memory

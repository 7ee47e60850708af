"""Open file descriptors lent to other ranks of the node."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mpishare.errors import HandleError
from mpishare.memory.door import Door
from mpishare.memory.visit import Visit

if TYPE_CHECKING:
    from mpishare.memory.door import Opening, Visitor


class Descriptors:
    def __init__(self) -> None:
        self._lent: dict[str, int] = {}
        self._opening: Opening | None = None
        self._door: Door | None = None

    @property
    def door(self) -> Door:
        """The door of this rank, made at the first use."""
        if self._door is None:
            self._door = Door()
        return self._door

    def lend(self, fd: int) -> str:
        """Return a token with which other ranks `borrow` this descriptor, until `take_back`."""
        if self._opening is None:
            self._opening = self.door.open("rank", self._answer)
        key = os.urandom(8).hex()
        self._lent[key] = fd
        return f"{self._opening.address}/{key}"

    def take_back(self, token: str) -> None:
        """Stop lending it, once every rank has borrowed it or failed to. The caller closes it."""
        del self._lent[token.rpartition("/")[2]]
        if not self._lent and self._opening is not None:
            self._opening.shut()
            self._opening = None

    def borrow(self, rank: int, token: str, timeout_s: float) -> int:
        """Return this process's own descriptor for another rank's file. Blocks.

        Raises as `Visit`; `UnsupportedError` where that rank does not lend it.
        """
        address, _, key = token.rpartition("/")
        with Visit(address, f"rank {rank}", timeout_s) as visit:
            _, fds = visit.ask({"key": key}, most_fds=1)
        if len(fds) != 1:
            raise HandleError(
                f"rank {rank} lent a file that did not arrive: this process may have no descriptor "
                "left (ulimit -n)"
            )
        return fds[0]

    def close(self) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None

    def _answer(self, request: dict[str, Any], _: Visitor) -> tuple[dict[str, Any], list[int]]:
        return {}, [self._lent[request["key"]]]

"""Lend open file descriptors to the other ranks of the node."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from mpishare.memory.door import Door, Visit

if TYPE_CHECKING:
    from collections.abc import Sequence


class Descriptors:
    """The descriptors that this rank lends, and the way to those of others. Methods are local.

    Parameters
    ----------
    nonces : sequence of str
        For each rank of the node, the unique name of its process.
    rank : int
        This process.
    """

    def __init__(self, nonces: Sequence[str], rank: int) -> None:
        self._nonces = nonces
        self._rank = rank
        self._lent: dict[str, int] = {}
        self._door: Door | None = None

    @property
    def door(self) -> Door:
        """The door of this rank, made at the first use."""
        if self._door is None:
            self._door = Door()
        return self._door

    def lend(self, fd: int) -> str:
        """Return a token with which other ranks `borrow` this descriptor, until `take_back`."""
        if not self._lent:
            self.door.open(self._nonces[self._rank], self._answer)
        token = secrets.token_hex(8)
        self._lent[token] = fd
        return token

    def take_back(self, token: str) -> None:
        """Lend it no more, once every rank has borrowed it or failed to. The caller closes it."""
        del self._lent[token]
        if not self._lent:
            self.door.shut(self._nonces[self._rank])

    def borrow(self, rank: int, token: str, timeout_s: float) -> int:
        """Return a descriptor of my own for what another rank lends. Blocks.

        Raises
        ------
        HandleError, PeerTimeout, UnsupportedError
            As `Visit`; UnsupportedError where that rank does not lend it.
        """
        with Visit(self._nonces[rank], timeout_s) as visit:
            _, fds = visit.ask({"token": token})
        return fds[0]

    def close(self) -> None:
        """Close the door."""
        if self._door is not None:
            self._door.close()
            self._door = None

    def _answer(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        return {}, [self._lent[request["token"]]]

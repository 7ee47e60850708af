"""Moves the cells of fields in host memory: calls block, so there is nothing for a stream to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.halo.host import HostRoute, add, put
from mpishare.halo.layout import Layout, as_numpy, require_number
from mpishare.halo.mpi import MpiRoute

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.halo.message import Message
    from mpishare.halo.terms import Terms


class HostMover:
    """The routes ``host`` and ``mpi`` of one plan. Collective, host-blocking.

    Parameters
    ----------
    terms : Terms
        The plan's.
    sends, recvs : sequence of Message
        What this rank sends and receives.
    is_reverse : bool
        Whether cells that come in are added, and those that were sent are zeroed.
    """

    def __init__(
        self,
        terms: Terms,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        *,
        is_reverse: bool,
    ) -> None:
        ranks, name = terms.ranks, terms.name
        routes = terms.routes[ranks.rank]
        self._layouts = terms.mine
        self._zeroed = sends if is_reverse else ()

        def by(route: str, messages: Sequence[Message]) -> list[Message]:
            return [message for message in messages if routes[message.peer] == route]

        land = add if is_reverse else put
        told = terms.recvs if is_reverse else terms.sends
        here = by("host", sends), by("host", recvs)
        self._host = HostRoute(
            ranks, name, terms.layouts, *here, told, land, is_direct=not is_reverse
        )
        away = by("mpi", sends), by("mpi", recvs)
        made: list[MpiRoute] = []
        try:
            ranks.step(name, lambda: made.append(MpiRoute(ranks, name, terms.mine, *away, land)))
        except BaseException:
            self._host.close()
            raise
        self._mpi = made[0]
        self.staging_nbytes = self._host.staging_nbytes + self._mpi.staging_nbytes

    def take(self, fields: Sequence[Any]) -> list[Any]:
        """Return the arrays of a call, as those elements in which cells travel."""
        layouts = self._layouts
        require_number(fields, len(layouts))
        found = []
        for field, expected in zip(fields, layouts, strict=True):
            array = field if type(field) is np.ndarray else as_numpy(field, "a field")
            if (
                array.shape != expected.shape
                or array.strides != expected.strides
                or array.dtype != expected.dtype
            ):
                expected.require(Layout(array.shape, array.strides, array.dtype, None))
            if not array.flags.writeable:
                raise ValueError("a field is read-only")
            found.append(array if expected.is_plain else array.view(expected.carrier))
        return found

    def start(self, arrays: list[Any], stream: Any) -> None:  # noqa: ARG002  no streams
        """Let my cells go."""
        self._mpi.start(arrays)
        self._host.start(arrays)

    def wait(self, arrays: list[Any], stream: Any) -> None:  # noqa: ARG002  no streams
        """Take the others' cells."""
        self._host.wait(arrays)
        self._mpi.wait(arrays)
        for message in self._zeroed:
            for part in message.parts:
                arrays[part.field][part.key] = 0

    def exchange(self, arrays: list[Any], stream: Any) -> None:
        """Do both."""
        self.start(arrays, stream)
        self.wait(arrays, stream)

    def is_captured(self, fields: Sequence[Any], stream: Any) -> bool:  # noqa: ARG002  no streams
        """Return False."""
        return False

    def lagging(self) -> list[int]:
        """Return none: waits of the host see for themselves."""
        return []

    def drain(self) -> None:
        """Nothing: calls block."""

    def release(self) -> None:
        """Nothing: what is shared is unmapped by each for itself."""

    def close(self) -> None:
        """Unmap, and free the requests. Local."""
        self._host.close()
        self._mpi.close()

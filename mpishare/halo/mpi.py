"""Route ``mpi`` for fields in host memory: packed, sent by MPI, unpacked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.halo.mail import Mail

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.halo.layout import Layout
    from mpishare.halo.message import Message
    from mpishare.halo.ranks import Ranks

    Array = np.ndarray[Any, Any]
    Packed = list[tuple[int, Any, Array]]  # field, what to index, the packed cells


class MpiRoute:
    """The messages of one plan to ranks of other nodes. Local.

    Parameters
    ----------
    ranks, name, land
        As `HostRoute`.
    layouts : sequence of Layout
        This rank's fields'.
    sends, recvs : sequence of Message
        What goes by this route.
    """

    def __init__(
        self,
        ranks: Ranks,
        name: str,
        layouts: Sequence[Layout],
        sends: Sequence[Message],
        recvs: Sequence[Message],
        land: Callable[[Array, Any, Array], None],
    ) -> None:
        self._land = land
        outgoing = [np.empty(message.nbytes, np.uint8) for message in sends]
        incoming = [np.empty(message.nbytes, np.uint8) for message in recvs]
        self._packs = _packed(layouts, sends, outgoing)
        self._takes = _packed(layouts, recvs, incoming)
        self._mail = Mail(ranks, name, sends, recvs, outgoing, incoming)
        self.staging_nbytes = sum(data.nbytes for data in (*outgoing, *incoming))

    def start(self, arrays: Sequence[Array]) -> None:
        """Pack and send; does not wait."""
        self._mail.receive()
        for field, key, cells in self._packs:
            cells[...] = arrays[field][key]
        self._mail.send()

    def wait(self, arrays: Sequence[Array]) -> None:
        """Wait for all messages, then unpack."""
        self._mail.finish()
        for field, key, cells in self._takes:
            self._land(arrays[field], key, cells)

    def close(self) -> None:
        """Free the requests. Local."""
        self._mail.close()


def _packed(
    layouts: Sequence[Layout], messages: Sequence[Message], buffers: Sequence[Array]
) -> Packed:
    return [
        (
            part.field,
            part.key,
            np.ndarray(part.shape, layouts[part.field].carrier, buffer=buffer, offset=offset),
        )
        for message, buffer in zip(messages, buffers, strict=True)
        for part, offset in zip(message.parts, message.offsets(), strict=True)
    ]

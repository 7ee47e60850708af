"""Rows that go to ranks of other nodes: in one message, whose last words say how many they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.rows.slots import views_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.plans.comm import PlanComm
    from mpishare.rows.form import Form, Key
    from mpishare.rows.slots import SlotPair

_WORDS = 3
"""The rows; what the peer may send by the next migration, and how many there are: on GPUs."""


class MessagePair:
    """The rows that go to one peer and come from it, as `slots.SlotPair`."""

    nbytes = 0

    def __init__(self, comm: PlanComm, form: Form, key: Key) -> None:
        from mpi4py import MPI

        self._form, self._comm, self._status = form, comm.comm, MPI.Status()
        self._to = key.rank, comm.first_tag + key.tag
        self._source = key.rank, comm.first_tag + key.far_tag
        self._sending: Any = None  # requests
        self._receiving: Any = None
        self._sent = self._came = np.empty(0, np.uint8)
        self._nsent = 0
        self._epoch = 0  # the last that has come
        self.count = self.credit = self.wanted = 0
        self.columns: list[Any] = []

    def reserve(self, count: int, credit: int = 0, wanted: int = 0) -> None:
        nbytes, self._nsent = self._form.offsets(count)[-1], count
        self._sent = np.empty(nbytes + 8 * _WORDS, np.uint8)
        self._sent[nbytes:].view(np.int64)[:] = count, credit, wanted

    def slot(self, epoch: int) -> list[Any]:  # noqa: ARG002
        return views_of(self._form, self._sent, self._nsent)

    def send(self, count: int = 0, epoch: int = 0) -> None:  # noqa: ARG002
        self._sending = self._comm.Isend(self._sent, *self._to)

    def is_over(self, epoch: int) -> bool:
        return self._has_come(epoch) and self._is_sent()

    def _is_sent(self) -> bool:
        if self._sending is not None and self._sending.Test():
            self._sending = None
        return self._sending is None

    def _has_come(self, epoch: int) -> bool:
        """Whether the message of an epoch is there; its size is that of what is received."""
        if self._epoch >= epoch:
            return True
        if self._receiving is None:
            message = self._comm.Improbe(*self._source, self._status)
            if message is None:
                return False
            self._came = np.empty(self._status.count, np.uint8)
            self._receiving = message.Irecv(self._came)
        if not self._receiving.Test():
            return False
        self._receiving, self._epoch = None, epoch
        return True

    def spin(self, epoch: int, spins_per_yield: int) -> bool:  # noqa: ARG002
        """Do not wait: MPI is asked in the long wait, also whether it has sent."""
        return False

    def open(self, epoch: int) -> None:  # noqa: ARG002
        words = self._came[-8 * _WORDS :].view(np.int64)
        self.count, self.credit, self.wanted = map(int, words)
        self.columns = views_of(self._form, self._came, self.count)

    def close(self) -> None:
        """Do nothing: a plan closes once all that was sent has come."""


def late(keys: Sequence[Key], pairs: Sequence[SlotPair | MessagePair], epoch: int) -> list[int]:
    """Return the ranks whose rows have not come, and those whose messages are not sent."""
    both = zip(keys, pairs, strict=True)
    return sorted({key.rank for key, pair in both if not pair.is_over(epoch)})

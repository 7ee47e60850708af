"""Moves the cells of fields in host memory: calls block, so there is nothing for a stream to do."""

from __future__ import annotations

import operator
import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.errors import MpiShareError
from mpishare.halo.host.copies import add, put
from mpishare.halo.host.shared import HostRoute
from mpishare.halo.layout import Layout, as_numpy, require_number
from mpishare.halo.mpi_route import MpiRoute

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.halo.engine import PlanSetup
    from mpishare.halo.host.copies import Call
    from mpishare.halo.message import Message

_KEPT = 64  # calls whose arrays are known again


class HostEngine:
    """The routes ``host`` and ``mpi`` of one plan. Collective, host-blocking.

    Parameters
    ----------
    setup : PlanSetup
        The plan's.
    sends, recvs : sequence of Message
        What this rank sends and receives.
    is_reverse : bool
        Whether cells that come in are added, and those that were sent are zeroed.
    """

    def __init__(
        self,
        setup: PlanSetup,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        *,
        is_reverse: bool,
    ) -> None:
        ranks, name = setup.comm, setup.name
        self._name = name
        routes = setup.routes[ranks.rank]
        self._context = ranks.context
        self._agreement = ranks.context.agreement
        self._layouts = setup.mine
        self._known: dict[tuple[int, ...], tuple[list[Any], Call]] = {}
        self._zeroed = sends if is_reverse else ()

        def by(route: str, messages: Sequence[Message]) -> list[Message]:
            return [message for message in messages if routes[message.peer] == route]

        land = add if is_reverse else put
        told = setup.recvs if is_reverse else setup.sends
        here = by("host", sends), by("host", recvs)
        self._host = HostRoute(
            ranks, name, setup.layouts, *here, told, land, is_direct=not is_reverse
        )
        away = by("mpi", sends), by("mpi", recvs)
        made: list[MpiRoute] = []
        try:
            ranks.step(name, lambda: made.append(MpiRoute(ranks, name, setup.mine, *away, land)))
        except BaseException:
            self._host.close()
            raise
        self.staging_nbytes = self._host.staging_nbytes + made[0].staging_nbytes
        self._mpi = made[0] if any(away) else None
        self._is_plain = self._mpi is None and not is_reverse

    def prepare(self, fields: Sequence[Any]) -> list[Any]:
        """Return what is prepared for the arrays of a call, and the arrays, which hold the memory.

        Those of NumPy are known again as long as they live; their layout is looked at all the same.
        """
        call = self._seen(fields)
        return self._take(fields) if call is None else [call, fields]

    def _seen(self, fields: Sequence[Any]) -> Call | None:
        """Return what is prepared for arrays that were seen before and still fit."""
        # Written for speed: every exchange of small faces comes through here.
        key = (id(fields[0]),) if len(fields) == 1 else tuple(map(id, fields))
        found = self._known.get(key)
        if found is None:
            return None
        seen, call = found
        for at, field in enumerate(fields):
            ref, shape, strides, dtype = seen[at]
            if (
                ref() is not field
                or field.shape != shape
                or field.strides != strides
                or field.dtype != dtype
                or not field.flags.writeable
            ):
                return None
        return call if call.version == self._context.windows_version else None

    def _take(self, fields: Sequence[Any]) -> list[Any]:
        """Check the arrays of a call and prepare it."""
        require_number(fields, len(self._layouts))
        arrays = []
        for field, expected in zip(fields, self._layouts, strict=True):
            array = field if type(field) is np.ndarray else as_numpy(field, "a field")
            expected.require(Layout(array.shape, array.strides, array.dtype, None))
            if not array.flags.writeable:
                raise ValueError("a field is read-only")
            arrays.append(array)
        addresses = tuple(array.__array_interface__["data"][0] for array in arrays)
        call = self._host.prepare(addresses)
        if all(map(operator.is_, arrays, fields)):
            if len(self._known) >= _KEPT:
                self._known.clear()
            # By weak references: an array that is gone may have its number taken by another.
            seen = [(weakref.ref(each), each.shape, each.strides, each.dtype) for each in arrays]
            self._known[tuple(map(id, arrays))] = seen, call
        return [call, arrays]

    def try_fast(self, fields: Sequence[Any], stream: Any) -> bool:  # noqa: ARG002  no streams
        """Exchange fields that were seen before, or return False with nothing done.

        A small face takes less time to move than Python takes to look at a call.
        """
        agreement = self._agreement
        if self._is_plain and agreement.failure is None and agreement.thread == get_ident():
            call = self._seen(fields)
            if call is not None:
                try:
                    self._host.start(call)
                    self._host.wait(call)
                except BaseException as error:
                    self._broken_off("exchange", error)
                    raise
                return True
        return False

    def start(self, arrays: list[Any], stream: Any) -> None:  # noqa: ARG002  no streams
        """Let my cells go."""
        call: Call = arrays[0]
        try:
            if self._mpi is not None:
                self._mpi.start(call.arrays)
            self._host.start(call)
        except BaseException as error:
            self._broken_off("start", error)
            raise

    def wait(self, arrays: list[Any], stream: Any) -> None:  # noqa: ARG002  no streams
        """Take the others' cells."""
        call: Call = arrays[0]
        try:
            self._host.wait(call)
            if self._mpi is not None:
                self._mpi.wait(call.arrays)
        except BaseException as error:
            self._broken_off("wait", error)
            raise
        for message in self._zeroed:
            for part in message.parts:
                call.arrays[part.field][part.key] = 0

    def _broken_off(self, call: str, error: BaseException) -> None:
        """Leave the node by an interrupt: neighbors may still read what may be written now."""
        if not isinstance(error, MpiShareError):
            self._agreement.leave(f"{self._name}: {call}", error)

    def exchange(self, arrays: list[Any], stream: Any) -> None:
        """Do both."""
        self.start(arrays, stream)
        self.wait(arrays, stream)

    def is_captured(self, fields: Sequence[Any], stream: Any) -> bool:  # noqa: ARG002  no streams
        """Return False."""
        return False

    def pending(self) -> list[int]:
        """Return none: waits of the host see for themselves."""
        return []

    def leave(self, until: float) -> None:
        """Nothing: calls block, and whoever waits looks at what is there."""

    def drain(self) -> None:
        """Nothing: calls block."""

    def release(self) -> None:
        """Nothing: what is shared is unmapped by each for itself."""

    def close(self) -> None:
        """Unmap, and free the requests. Local."""
        self._known.clear()  # what is prepared for a call looks at the memory
        self._host.close()
        if self._mpi is not None:
            self._mpi.close()

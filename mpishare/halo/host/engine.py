"""The engine for fields in host memory. Its calls block, so nothing is ordered on streams."""

from __future__ import annotations

import operator
import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.backends.streams import handle_of
from mpishare.coordination import recording
from mpishare.halo.host.copies import add, put
from mpishare.halo.host.shared import HostRoute
from mpishare.plans.disjoint import Disjoint
from mpishare.plans.engine import HostPlanEngine
from mpishare.plans.layout import FieldLayout, address_of, as_numpy, require_number
from mpishare.plans.mpi_route import HostMpiRoute

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.halo.host.copies import Array
    from mpishare.halo.host.shared import BoundCall
    from mpishare.plans.engine import RoutedSetup
    from mpishare.plans.message import Message

_MAX_CACHED = 256  # calls whose arrays are recognized


# These are plain classes with slots: in Python the fastest records to make and to read.
class HostCall:
    """A prepared call: its copies, and the fields, whose memory it holds until `wait` is over."""

    __slots__ = ("bound", "fields")

    def __init__(self, bound: BoundCall, fields: Sequence[Any]) -> None:
        self.bound = bound
        self.fields = fields


class _SeenField:
    """An array of an earlier call. Weakly referenced: a new array may get the id of a dead one."""

    __slots__ = ("dtype", "ref", "shape", "strides")

    def __init__(self, array: Array) -> None:
        self.ref: Callable[[], Any] = weakref.ref(array)
        self.shape = array.shape
        self.strides = array.strides
        self.dtype = array.dtype


class HostEngine(HostPlanEngine):
    """The routes ``host`` and ``mpi`` of one plan. Collective, host-blocking.

    Parameters
    ----------
    setup : RoutedSetup
        The plan's.
    sends, recvs : sequence of Message
        What this rank sends and receives.
    is_reverse : bool
        Whether received cells are added, and the cells that were sent are zeroed.
    """

    _route: type[HostRoute] = HostRoute

    def __init__(
        self,
        setup: RoutedSetup,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        *,
        is_reverse: bool,
    ) -> None:
        self._name = setup.name
        call = setup.call_name(is_reverse=is_reverse)
        self._call = f"{setup.name}: {call}"
        self._context = setup.context
        self._agreement = setup.context.agreement
        self._layouts = setup.mine
        self._disjoint = Disjoint(setup.mine)
        count = len(setup.mine)
        self._names = ["a field"] if count == 1 else [f"field {n}" for n in range(count)]
        self._seen: dict[tuple[int, ...], tuple[list[_SeenField], BoundCall]] = {}
        self._once: dict[int, weakref.ref[Array]] = {}  # first fields of calls made once
        self._zeroed = sends if is_reverse else ()

        def by(route: str, messages: Sequence[Message]) -> list[Message]:
            return [message for message in messages if setup.my_routes[message.peer] == route]

        store = add if is_reverse else put
        by_host = by("host", sends), by("host", recvs)
        by_mpi = by("mpi", sends), by("mpi", recvs)
        self._host: HostRoute = self._route(setup, by_host[0], is_reverse=is_reverse)
        self._mpi: HostMpiRoute
        self._uses_mpi = any(by_mpi)

        def make() -> None:
            self._host.lay_out(setup, *by_host, is_reverse=is_reverse)
            self._mpi = HostMpiRoute(setup, *by_mpi, store, call)

        try:
            setup.comm.step(setup.name, make)
        except BaseException:
            self._host.close()
            if hasattr(self, "_mpi"):  # another rank failed
                self._mpi.close()
            raise
        self.staging_nbytes = self._host.staging_nbytes + self._mpi.staging_nbytes
        self._has_fast_path = not self._uses_mpi and not is_reverse

    def prepare(self, fields: Sequence[Any]) -> HostCall:
        """Check the fields of a call and bind its copies to them.

        NumPy arrays are recognized as long as they live, if their layout is still the same.
        """
        recording.require_none(self._name, "its fields are in host memory")
        bound = self._bound_before(fields) or self._unbound(fields)
        return self._bind(fields) if bound is None else HostCall(bound, fields)

    def _bound_before(self, fields: Sequence[Any]) -> BoundCall | None:
        """Return the copies of a call with these arrays that was made before, if they still fit."""
        # Written for speed: every exchange of small faces comes through here.
        found = self._seen.get((id(fields[0]),) if len(fields) == 1 else tuple(map(id, fields)))
        if found is None:
            return None
        seen, bound = found
        for at, field in enumerate(fields):
            before = seen[at]
            if (
                before.ref() is not field
                or field.shape != before.shape
                or field.strides != before.strides
                or field.dtype != before.dtype
                or not field.flags.writeable
            ):
                return None
        return bound if bound.windows_version == self._context.windows_version else None

    def _unbound(self, fields: Sequence[Any]) -> BoundCall | None:
        """Return a call with arrays that are seen for the first time, if it needs no preparing.

        Programs that make new arrays at each call never show one twice, and binding its copies
        takes longer than copying small faces. Arrays that come again are bound then.
        """
        if len(fields) != len(self._layouts):
            return None
        for field, expected in zip(fields, self._layouts, strict=True):
            if (
                type(field) is not np.ndarray
                or field.shape != expected.shape
                or field.strides != expected.strides
                or field.dtype != expected.dtype
                or not field.flags.writeable
            ):
                return None
        if len(fields) > 1 and not self._disjoint.are_apart(list(map(address_of, fields))):
            return None
        first = fields[0]
        before = self._once.get(id(first))
        if before is not None and before() is first:
            return None
        if len(self._once) >= _MAX_CACHED:
            self._once.clear()
        self._once[id(first)] = weakref.ref(first)
        return self._host.unbound(fields)

    def _bind(self, fields: Sequence[Any]) -> HostCall:
        """Check the fields of a call and bind its copies."""
        arrays, addresses = self._checked(fields)
        bound = self._host.bind(addresses)
        if all(map(operator.is_, arrays, fields)):
            if len(self._seen) >= _MAX_CACHED:
                del self._seen[next(iter(self._seen))]  # the oldest
            self._seen[tuple(map(id, arrays))] = list(map(_SeenField, arrays)), bound
        return HostCall(bound, arrays)

    def _checked(self, fields: Sequence[Any]) -> tuple[list[Array], tuple[int, ...]]:
        """Return the fields of a call as arrays of the plan's layouts, and their addresses."""
        require_number(fields, len(self._layouts))
        arrays = []
        for field, expected, name in zip(fields, self._layouts, self._names, strict=True):
            array = field if type(field) is np.ndarray else as_numpy(field, name)
            expected.require(FieldLayout(array.shape, array.strides, array.dtype, None), name)
            if not array.flags.writeable:
                raise ValueError(f"{name} is read-only")
            arrays.append(array)
        addresses = tuple(map(address_of, arrays))
        self._disjoint.require(addresses)
        return arrays, addresses

    def try_start(self, fields: Sequence[Any], stream: Any) -> bool:  # noqa: ARG002  see `start`
        """Return False: what takes time here is the work itself."""
        return False

    def try_wait(self, stream: Any) -> bool:  # noqa: ARG002  see `wait`
        """Return False, as `try_start`."""
        return False

    def try_fast(self, fields: Sequence[Any], stream: Any) -> bool:
        """Exchange fields that were seen before, or return False with nothing done.

        Copying a small face takes less time than preparing the call in Python.
        """
        if stream is not None:
            handle_of(stream)
        agreement = self._agreement
        is_whole = agreement.failure is None and agreement.thread == get_ident()
        if self._has_fast_path and is_whole and recording.current() is None:
            bound = self._bound_before(fields) or self._unbound(fields)
            if bound is not None:
                try:
                    self._host.start(bound)
                    self._host.wait(bound)
                except BaseException as error:
                    self._leave_node(error)
                    raise
                return True
        return False

    def ahead(self) -> list[int]:
        """Ranks of the node that have called more often than this one."""
        return self._host.ahead()

    def start(self, call: HostCall, stream: Any) -> None:
        """Send my cells."""
        if stream is not None:
            handle_of(stream)
        bound = call.bound
        try:
            if self._uses_mpi:
                self._mpi.start(bound.arrays)
            self._host.start(bound)
        except BaseException as error:
            self._leave_node(error)
            raise

    def wait(self, call: HostCall, stream: Any) -> None:
        """Receive the others' cells into the ghosts."""
        if stream is not None:
            handle_of(stream)
        bound = call.bound
        try:
            self._host.wait(bound)
            if self._uses_mpi:
                self._mpi.wait(bound.arrays)
        except BaseException as error:
            self._leave_node(error)
            raise
        for message in self._zeroed:
            for part in message.parts:
                bound.arrays[part.field][part.key] = 0

    def exchange(self, call: HostCall, stream: Any) -> None:
        """Do both."""
        self.start(call, stream)
        self.wait(call, stream)

    def _leave_node(self, error: BaseException) -> None:
        """Leave the node after an error: neighbors may read fields that the user overwrites."""
        self._agreement.leave(self._call, error)

    def close(self) -> None:
        """Unmap the shared memory, and free the MPI requests."""
        self._seen.clear()  # bound calls refer to the memory
        self._once.clear()
        self._host.close()
        self._mpi.close()

"""The engine for fields in host memory. Its calls block, so nothing is ordered on streams."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.backends.streams import handle_of
from mpishare.coordination import recording
from mpishare.errors import ClosedError
from mpishare.halo.host.compiled_route import CompiledRoute, adds
from mpishare.halo.host.copies import HostCall, add, put
from mpishare.halo.host.reference import ReferenceRoute
from mpishare.plans.disjoint import Disjoint
from mpishare.plans.engine import PlanEngine
from mpishare.plans.layout import FieldLayout, address_of, as_numpy, require_number
from mpishare.plans.mpi_route import HostMpiRoute
from mpishare.runtime.route import HOST, MESSAGES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.halo.host.copies import Array
    from mpishare.plans.engine import RoutedSetup
    from mpishare.plans.message import Message
    from mpishare.runtime.route import Route


# By the route, the class of those that a plan has only where it has messages by them.
_BESIDE_HOST = {MESSAGES: HostMpiRoute}


class HostEngine(PlanEngine):
    """The routes of one plan: ``host``, and those of `_BESIDE_HOST`. Collective, host-blocking.

    `sends` and `recvs` are what this rank sends and receives. In the reverse, received cells are
    added, and the cells that were sent are set to zero.
    """

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
        self._agreement = setup.context.agreement
        self._layouts = setup.mine
        self._carriers = [None if each.is_plain else each.carrier for each in setup.mine]
        self._disjoint = Disjoint(setup.mine)
        count = len(setup.mine)
        self._names = ["a field"] if count == 1 else [f"field {n}" for n in range(count)]
        by_host = _by(HOST, setup, sends), _by(HOST, setup, recvs)
        beside = {
            make: (_by(route, setup, sends), _by(route, setup, recvs))
            for route, make in _BESIDE_HOST.items()
        }
        self._zeroed = [each for sent, _ in beside.values() for each in sent if is_reverse]
        self._host = _make_route(setup, is_reverse=is_reverse)
        self._compiled = self._host if isinstance(self._host, CompiledRoute) else None
        self._beside: list[HostMpiRoute] = []
        self._is_open = True

        def make() -> None:
            self._host.lay_out(*by_host)
            store = add if is_reverse else put
            for make_route, messages in beside.items():
                if any(messages):
                    self._beside.append(make_route(setup, *messages, store, call))

        try:
            setup.comm.step(setup.name, make)
        except BaseException:
            self._close_routes()
            raise
        self.staging_nbytes = sum(each.staging_nbytes for each in (self._host, *self._beside))
        self._busy = setup.busy
        self._bind_calls()

    def _bind_calls(self) -> None:
        """Make the calls of C, where these do all, attributes of the engine, for speed."""
        self.try_fast = self.try_start = self.try_wait = _refuse
        if self._compiled is not None and not self._beside:
            self.try_fast = self._in_node(self._compiled.try_exchange)
            self.try_start = self._in_node(self._compiled.try_start)
            self.try_wait = partial(self._in_node(self._compiled.try_wait), None)

    def _in_node(self, call: Callable[[Any], bool]) -> Callable[..., bool]:
        """Return a call of C, given also a stream, that leaves the node where it fails.

        Neighbors may read fields that the user overwrites then.
        """

        def made(given: Any, stream: Any) -> bool:
            if stream is not None:
                handle_of(stream)
            try:
                return call(given)
            except BaseException as error:
                self._leave_node(error)
                raise

        return made

    def prepare(self, fields: Sequence[Any]) -> HostCall:
        """Check the fields of a call: in C where it knows them, else in Python, which raises."""
        recording.require_none(self._name, "its fields are in host memory")
        require_number(fields, len(self._layouts))
        known = [
            field if type(field) is np.ndarray else as_numpy(field, name)
            for field, name in zip(fields, self._names, strict=True)
        ]
        addresses = None if self._compiled is None else self._compiled.addresses_of(known)
        if addresses is None:
            addresses = self._checked(known)
        pairs = zip(known, self._carriers, strict=True)
        arrays = [each if carrier is None else each.view(carrier) for each, carrier in pairs]
        return HostCall(arrays, addresses)

    def _checked(self, arrays: Sequence[Array]) -> tuple[int, ...]:
        """Return the addresses of arrays of the plan's layouts; raise at any other."""
        for array, expected, name in zip(arrays, self._layouts, self._names, strict=True):
            expected.require(FieldLayout(array.shape, array.strides, array.dtype, None), name)
            if not array.flags.writeable:
                raise ValueError(f"{name} is read-only")
        addresses = tuple(map(address_of, arrays))
        self._disjoint.require(addresses)
        return addresses

    def ahead(self) -> list[int]:
        """Ranks of the node that have called more often than this one."""
        return self._host.ahead()

    def start(self, call: HostCall, stream: Any) -> None:
        """Send my cells."""
        self._make(call, stream, self._start)

    def wait(self, call: HostCall, stream: Any) -> None:
        """Receive the others' cells into the ghosts."""
        self._make(call, stream, self._wait)

    def exchange(self, call: HostCall, stream: Any) -> None:
        """Start, then wait."""
        self._make(call, stream, self._start, self._wait)

    def _leave_node(self, error: BaseException) -> None:
        """Leave the node after an error: neighbors may read fields that the user overwrites.

        Not where a signal handler closed the plan, as all its ranks have done then.
        """
        if self._is_open:
            self._agreement.leave(self._call, error)
        elif not isinstance(error, ClosedError):  # of C, which finds its tables gone
            raise ClosedError(f"{self._call} failed: a signal handler closed the plan") from None

    def _make(self, call: HostCall, stream: Any, *steps: Callable[[HostCall], None]) -> None:
        """Make a call, marked as under way; leave the node where it fails, as `_in_node`."""
        if stream is not None:
            handle_of(stream)
        self._busy[0] = 1
        try:
            for step in steps:
                step(call)
        except BaseException as error:
            self._leave_node(error)
            raise
        finally:
            self._busy[0] = 0

    def _start(self, call: HostCall) -> None:
        for route in self._beside:
            route.start(call.arrays)
        self._host.start(call)

    def _wait(self, call: HostCall) -> None:
        self._host.wait(call)
        for route in self._beside:
            route.wait(call.arrays)
        for message in self._zeroed:
            for part in message.parts:
                call.arrays[part.field][part.key] = 0

    def close(self) -> None:
        """Unmap the shared memory, and free the MPI requests."""
        self._is_open = False
        self._close_routes()

    def _close_routes(self) -> None:
        self._host.close()
        for route in self._beside:
            route.close()


def _by(route: Route, setup: RoutedSetup, messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if setup.my_routes[message.peer] is route]


def _make_route(setup: RoutedSetup, *, is_reverse: bool) -> CompiledRoute | ReferenceRoute:
    """Make the route in C if it is there and knows these numbers, else the reference."""
    module = setup.context.compiled
    if module is None:
        return ReferenceRoute(setup, is_reverse=is_reverse)
    if not is_reverse or all(adds(module, each.dtype) for each in setup.mine):
        return CompiledRoute(setup, is_reverse=is_reverse)
    return ReferenceRoute(setup, is_reverse=is_reverse)


def _refuse(*_: Any) -> bool:
    return False

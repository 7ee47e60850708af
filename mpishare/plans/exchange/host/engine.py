"""The engine for fields in host memory. Its calls block, so nothing is ordered on streams."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from mpishare.backends import handle_of
from mpishare.coordination import recording
from mpishare.memory.memory import address_of
from mpishare.plans.disjoint import Disjoint
from mpishare.plans.engine import PlanEngine
from mpishare.plans.exchange.host.compiled_route import CompiledRoute
from mpishare.plans.exchange.host.messages import MessageRoute
from mpishare.plans.layout import (
    FieldLayout,
    as_numpy,
    require_number,
    require_writeable,
)
from mpishare.plans.message import are_sent_once
from mpishare.runtime.route import HOST, MESSAGES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.plans.engine import RoutedSetup
    from mpishare.plans.exchange.host.route import Array, HostRoute
    from mpishare.runtime.route import Route

    Step = Callable[[Sequence[Array]], None]


def _within_node(setup: RoutedSetup) -> HostRoute:
    """Make the route in C where all ranks have it and it knows these numbers; else by messages."""
    # C does not add and round.
    is_known = setup.wire is None if setup.adds else setup.wire in (None, "float32")
    return CompiledRoute(setup) if setup.is_compiled and is_known else MessageRoute(setup)


# Two ranks with a cache of 2 MB: one round took 0.8 of two at this size, 1.4 at twice as much.
_MAX_ROUND_NBYTES = 1 << 20


def _make_routes(setup: RoutedSetup) -> dict[Route, HostRoute]:
    """Make the routes that any rank of the plan uses, in the order of their starts. Collective."""
    made: dict[Route, HostRoute] = {HOST: _within_node(setup)}
    if any(MESSAGES in each.values() for each in setup.routes):
        made[MESSAGES] = MessageRoute(setup)
    return made


def _lay_out(setup: RoutedSetup, made: dict[Route, HostRoute]) -> None:
    """Give each route this rank's messages that take it."""
    for route, each in made.items():
        sends, recvs = (
            [message for message in messages if setup.my_routes[message.peer] is route]
            for messages in (setup.my_sends, setup.my_recvs)
        )
        each.lay_out(sends, recvs)


class HostEngine(PlanEngine):
    """The routes of one plan: `HOST`, and `MESSAGES` if it uses them. Collective to make.

    `CudaEngine` has the same methods: local, and stream-ordered there. Calls raise `TypeError` or
    `ValueError` for fields that are not those of the plan, before anything is done.
    """

    def __init__(self, setup: RoutedSetup) -> None:
        self._setup, self._name, self._call = setup, setup.name, setup.full_call
        self._agreement = setup.context.agreement
        self._layouts = setup.mine
        count = len(setup.mine)
        self._names = ["a field"] if count == 1 else [f"field {n}" for n in range(count)]
        self._disjoint = Disjoint(setup.mine)
        made = _make_routes(setup)
        self._routes, self._host = [*made.values()], made[HOST]
        try:
            setup.comm.step(setup.name, partial(_lay_out, setup, made))
        except BaseException:
            self.close()
            raise
        self.staging_nbytes = sum(each.staging_nbytes for each in self._routes)
        mine = {HOST, *setup.my_routes.values()}
        routes = [each for route, each in made.items() if route in mine]
        self._bind_calls([each.start for each in routes], [each.wait for each in routes[::-1]])

    def _bind_calls(self, starts: Sequence[Step], waits: Sequence[Step]) -> None:
        """Make the calls, each by C where C does all of it."""
        in_c = self._host.exchange if isinstance(self._host, CompiledRoute) else None
        self._knows = _never if in_c is None else in_c.knows
        fast = (_never, _never, _never)
        if in_c is not None and len(starts) == 1:
            fast = (in_c.try_exchange, in_c.try_start, in_c.try_wait)
        self.exchange = self._bind(fast[0], [*starts, *waits])
        self.start = self._bind(fast[1], starts)
        self.wait = self._bind(fast[2], waits)

    def _bind(
        self, try_fast: Callable[[Any], bool], steps: Sequence[Step]
    ) -> Callable[[Sequence[Any], Any], None]:
        """Return a call: by C, where it may and knows the fields, else step by step."""

        def call(fields: Sequence[Any], stream: Any) -> None:
            if stream is not None:
                handle_of(stream)
            try:
                if try_fast(fields):
                    return
            except BaseException as error:
                # Neighbors may read fields that the user overwrites.
                self._agreement.life.leave(self._call, error)
                raise
            self._make(fields, steps)

        return call

    def both_ways(self) -> HostEngine | None:
        """Return an engine that adds what comes back, and brings the sums, for a forward one.

        In one round, where only two ranks have each cell. None on all ranks if that takes the
        reverse, then an exchange. Collective, host-blocking.
        """
        setup = self._setup
        are_pairs = all(setup.comm.step(setup.name, partial(_are_pairs, setup)))
        return HostEngine(setup.both_ways()) if are_pairs else None

    def require(self, fields: Sequence[Any]) -> Sequence[Array]:
        """Check the fields of a call: in C where it knows them, else in Python, which raises.

        They are returned in the dtypes in which cells travel.
        """
        recording.require_none(self._name, "its fields are in host memory")
        require_number(fields, len(self._layouts))
        names = self._names
        arrays = [as_numpy(field, name) for field, name in zip(fields, names, strict=True)]
        if not self._knows(arrays):
            for array, expected, name in zip(arrays, self._layouts, names, strict=True):
                expected.require(FieldLayout.of_host(array), name)
                require_writeable(array, name)
            self._disjoint.require([*map(address_of, arrays)])
        pairs = zip(arrays, self._layouts, strict=True)
        return [array if each.is_plain else array.view(each.carrier) for array, each in pairs]

    def _make(self, fields: Sequence[Any], steps: Sequence[Step]) -> None:
        """Make a call in steps; leave the node where it fails."""
        self._agreement.check()
        arrays = self.require(fields)
        with self._agreement.blocked(self._call):
            for step in steps:
                step(arrays)

    def close(self) -> None:
        for each in self._routes:
            each.close()


def _are_pairs(setup: RoutedSetup) -> bool:
    """Whether the cells of this rank are copied once at most, as they are, and by other ranks.

    Then both have the same two numbers to add, and a sum of two has no order. Of many cells two
    rounds take less: those of the exchange may be read where they are.
    """
    messages = (*setup.my_sends, *setup.my_recvs)
    parts = (part for message in messages for part in message.parts)
    return (
        setup.wire is None
        and sum(message.nbytes for message in setup.my_sends) <= _MAX_ROUND_NBYTES
        and all(message.peer != setup.comm.rank for message in messages)
        and all(part.factors is None for part in parts)
        and are_sent_once(setup.my_sends, setup.mine)
    )


def _never(_: Any) -> bool:
    """Do nothing: the call of C where there is none."""
    return False

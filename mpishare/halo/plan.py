"""The plan of an exchange: made once, called at every step."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from mpishare.coordination import recording
from mpishare.halo.any_fields import AnyFields, FieldCells
from mpishare.plans.base_plan import RoutedPlan
from mpishare.plans.exchange.pair import EnginePair, engine_class
from mpishare.plans.layout import name_fields
from mpishare.plans.setup import agree_on_routes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.memory.types import Array, Stream
    from mpishare.plans.engine import RoutedSetup
    from mpishare.plans.exchange.pair import Engine
    from mpishare.plans.setup import AgreedFields


class Plan(RoutedPlan):
    """An exchange of the same cells at every call, for any arrays of the same layout.

    `HaloExchange` and `NeighborExchange` choose the cells.
    """

    _log = logging.getLogger("mpishare.halo")
    _noun = "an exchange"
    _ranges = "exchange", "start", "wait", "accumulate"

    def __init__(self, agreed: AgreedFields, cells: FieldCells) -> None:
        self._fields: EnginePair | AnyFields
        self._forward: Engine | AnyFields  # an attribute of its own, for speed
        setup = agree_on_routes(
            agreed.setup, agreed.arrays, *cells.messages(agreed.setup), engine_class
        )
        if setup.takes_any:
            self._fields = self._forward = AnyFields(setup, cells)
            self._open_on_routes(setup)
        else:
            self._open_pair(setup)

    def _open_pair(self, setup: RoutedSetup) -> None:
        """Make the engines of a plan for fields that are known."""
        self._fields = EnginePair(setup)
        self._forward = self._fields.forward
        self._open_on_routes(setup)

    def exchange(self, *fields: Array, stream: Stream | None = None) -> None:
        """Bring every ghost up to date: `start`, then `wait`.

        Collective over the plan's ranks. Stream-ordered on CUDA (a `mpi` route waits on the host);
        on the host backend it blocks until this rank's ghosts are there.

        Parameters
        ----------
        *fields : arrays
            As many as the plan was made for, each of the layout that it had then, from any
            allocator, and no array twice.
            A plan made for a `Layout` without dtype takes any number of fields of its block; the
            ranks agree on each new combination at its first call, which is host-blocking.
        stream : stream, optional
            The stream that writes and reads the fields. Default: the current one of the library
            that the fields come from.

        Raises
        ------
        ValueError
            If number or layout of the fields differ from the plan's; the message names the
            difference. Nothing was sent then, and other ranks wait for this call: repeat it, or
            leave the node.
        TypeError
            If none are given.
        MismatchError
            If fields are new to a plan for any fields, and those of another rank differ in dtype or
            in axes that are not cut, or are not new there.
        UnsupportedError
            If they are new, in a capture.
        EpochError
            If an exchange is open, or a handler of a signal calls the plan amid a call on the host.
        PeerError, PeerTimeout
            If a rank is gone or does not come.
        ClosedError
            If the plan is closed.

        Notes
        -----
        If an exchange is interrupted (Ctrl-C), this rank leaves the node, since neighbors may have
        its cells, or be reading its fields.
        """
        if self._open is not None or self._is_closed or not fields:
            self._refuse("exchange")
        try:
            self._forward.exchange(fields, stream)
        except BaseException as error:
            self._fail("exchange", error)

    def start(self, *fields: Array, stream: Stream | None = None) -> None:
        """Begin an exchange: neighbors get the cells as the stream has left them.

        Collective over the plan's ranks. Until `wait` the owned cells may be read, and
        `HaloExchange.interior` and ghosts beyond a wall written. Parameters and errors as
        `exchange`.
        """
        if self._open is not None or self._is_closed or not fields:
            self._refuse("start")
        try:
            self._forward.start(fields, stream)
        except BaseException as error:
            self._fail("start", error)
        # At once: an interrupt comes where Python enters its next function, and the others would
        # take the same call, made again, for the next one.
        self._open = fields
        if recording.UNDER_WAY:
            self._end_with_capture()

    def wait(self, stream: Stream | None = None) -> None:
        """End the exchange that `start` began: ghosts may be read, owned cells be written.

        Collective over the plan's ranks. Stream-ordered on CUDA, as `exchange`. On the host it may
        last until the neighbors are in theirs, where they read my cells in place.

        Raises
        ------
        EpochError
            Without a `start`.
        """
        opened = self._open
        if opened is None or self._is_closed:
            self._check_started(opened)
        try:
            self._forward.wait(opened, stream)
        except BaseException as error:
            self._fail("wait", error)
        self._open = None

    def accumulate(
        self, *fields: Array, give_back: bool = False, stream: Stream | None = None
    ) -> None:
        """Add every ghost to the cell that it shadows, then set it to zero: the reverse.

        Collective over the plan's ranks; the first call allocates, host-blocking. In a
        fixed order: the same ghosts give the same bits. Fields, stream and errors as `exchange`.

        Parameters
        ----------
        give_back : bool
            Whether the ghosts get the sums of the cells that they shadow, and not zero: the bits of
            an `exchange` afterwards, by one call. The same on all ranks.

        Raises
        ------
        TypeError
            If a field's elements are no numbers.
        """
        if self._open is not None or self._is_closed or not fields:
            self._refuse("accumulate")
        try:
            pair = self._fields.pair_for("accumulate", fields, stream)
            if give_back:
                make = pair.make_giving_back
                made = pair.giving_back or self._make(
                    "accumulate(give_back=True)", pair, make, fields, stream
                )
                made(fields, stream)
            else:
                made = pair.reverse or self._make(
                    "accumulate", pair, pair.make_reverse, fields, stream
                )
                made.exchange(fields, stream)
        except BaseException as error:
            self._fail("accumulate", error)

    def _make(
        self, call: str, pair: EnginePair, make: Any, fields: Sequence[Any], stream: Any
    ) -> Any:
        self._check(call)

        def check() -> Sequence[Any]:
            pair.forward.require(fields)
            return fields

        return self._make_reverse(call, pair, check, stream, make)

    def _refuse(self, call: str) -> None:
        """Raise if the plan cannot be called now, or not without fields."""
        self._check_free(call)
        if not self._setup.mine:
            return  # of a rank without fields
        raise TypeError(f"{self.name}: {call} failed: no fields are given. Pass them: {call}(u)")

    def __repr__(self) -> str:
        return f"<mpishare.{self.name}: {self._describe()}{self._state()}>"

    def _describe(self) -> str:
        fields = f"fields={name_fields(self._setup.mine)}"
        if self._setup.takes_any:
            fields = f"any fields, {len(self._fields.setups) - 1} seen"
        wire = f", wire={self._setup.wire}" if self._setup.wire else ""
        return f"{fields}, routes={self._named_routes()}{wire}"

    @property
    def _engines(self) -> list[Engine]:
        return self._fields.engines

    @property
    def _setups(self) -> list[RoutedSetup]:
        return self._fields.setups

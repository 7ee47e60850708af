"""The plan of an exchange: made once, called at every step."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from mpishare.halo.any_fields import AnyFields
from mpishare.halo.made_with import MadeWith
from mpishare.plans.base_plan import RoutedPlan
from mpishare.plans.exchange.pair import EnginePair, engine_class
from mpishare.plans.layout import name_fields
from mpishare.plans.setup import agree_on_routes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from mpishare.coordination.agreement import Agreement
    from mpishare.halo.any_fields import FieldCells
    from mpishare.memory.types import Array, Stream
    from mpishare.plans.engine import Engine, RoutedSetup
    from mpishare.plans.setup import AgreedFields


class Plan(RoutedPlan):
    """An exchange of the same cells at every call, for any arrays of the same layout.

    `HaloExchange` and `NeighborExchange` choose the cells.
    """

    _log = logging.getLogger("mpishare.halo")
    _noun = "an exchange"
    _ranges = "exchange", "start", "wait", "accumulate"

    def __init__(self, agreed: AgreedFields, cells: FieldCells) -> None:
        self._made_with = MadeWith(agreed.arrays)
        messages = cells.messages(agreed.setup)
        setup = agree_on_routes(agreed.setup, agreed.arrays, *messages, engine_class)
        self._fields: EnginePair | AnyFields
        self._forward: Engine | AnyFields  # an attribute of its own, for speed
        if setup.takes_any:
            self._fields = self._forward = AnyFields(setup, cells)
        else:
            self._fields = EnginePair(setup)
            self._forward = self._fields.forward
        self._is_open_fast = False  # then `_open` has its fields, not the engine's prepared ones
        self._open_on_routes(setup)

    @property
    def _takes_any(self) -> bool:
        return self._setup.takes_any

    def exchange(self, *fields: Array, stream: Stream | None = None) -> None:
        """Bring every ghost up to date: `start`, then `wait`.

        Collective over the plan's ranks. Stream-ordered on CUDA (a `mpi` route waits on the host);
        on the host backend it blocks until this rank's ghosts are there.

        Parameters
        ----------
        *fields : arrays
            As many as the plan was made for, each of the layout that it had then, from any
            allocator, and no array twice. Default: the arrays that the plan was made with, if none
            was a `Layout`. The plan holds these until a call is given arrays, and no longer.
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
            If none are given to a plan that was made for a `Layout`, or if its arrays are gone.
        MismatchError
            If fields are new to a plan for any fields, and those of another rank differ in dtype or
            in axes that are not cut, or are not new there.
        UnsupportedError
            If they are new, in a capture.
        EpochError
            If an exchange is open, or a handler of a signal calls the plan in the midst of a call
            on the host.
        PeerError, PeerTimeout
            If a rank is gone or does not come.
        ClosedError
            If the plan is closed.

        Notes
        -----
        If an exchange on the host is interrupted (Ctrl-C), this rank leaves the node, since
        neighbors may still be reading its fields.
        """
        if fields and self._made_with.are_held:
            self._made_with.release()
        is_free = self._open is None and not self._is_closed
        if is_free and self._forward.try_fast(fields or self._made_with.arrays(), stream):
            return
        engine, call = self._begin("exchange", fields, stream)
        engine.exchange(call, stream)

    def start(self, *fields: Array, stream: Stream | None = None) -> None:
        """Begin an exchange: neighbors get the cells as the stream has left them.

        Collective over the plan's ranks. Until `wait` the owned cells may be read, and
        `HaloExchange.interior` and ghosts beyond a wall written. Parameters and errors as
        `exchange`.
        """
        if fields and self._made_with.are_held:
            self._made_with.release()
        is_free = self._open is None and not self._is_closed
        # A call is open at once: an interrupt comes where Python enters its next function, and the
        # others would take the same call, made again, for the next one.
        given = fields or self._made_with.arrays()
        if is_free and self._forward.try_start(given, stream):
            self._open, self._is_open_fast = given, True
            return
        opened = engine, call = self._begin("start", fields, stream)
        engine.start(call, stream)
        self._open, self._is_open_fast = opened, False
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
        # A handler of a signal that closes the plan behind the engine's wait must not wait again.
        opened, self._open = self._open, None
        try:
            is_fast = self._is_open_fast and opened is not None
            if is_fast and not self._is_closed and self._forward.try_wait(stream):
                return
            self._check_started(opened)
            if is_fast:
                engine = self._fields.pair_for("wait", opened, stream).forward
                engine.wait(engine.prepare(opened), stream)
            else:
                engine, call = opened
                engine.wait(call, stream)
        except BaseException:
            self._reopen(opened)
            raise

    def accumulate(self, *fields: Array, stream: Stream | None = None) -> None:
        """Add every ghost to the cell that it shadows, then set it to zero: the reverse.

        Collective over the plan's ranks; the first call allocates, host-blocking. In a
        fixed order: the same ghosts give the same bits. Parameters and errors as `exchange`.

        Raises
        ------
        TypeError
            If a field's elements are no numbers.
        """
        given = self._enter("accumulate", fields) if self._takes_any else fields
        pair = self._fields.pair_for("accumulate", given, stream)
        if pair.reverse is None:
            self._check("accumulate")

            def check() -> Sequence[Any]:
                entered = self._enter("accumulate", fields)
                self._prepare("accumulate", pair.forward, entered)
                return entered

            with self._context.agreement.collective():
                self._agree_on_reverse("accumulate", pair.forward, check, stream)
                pair.make_reverse()
        reverse = pair.make_reverse()
        call = self._prepare("accumulate", reverse, self._enter("accumulate", fields))
        reverse.exchange(call, stream)

    def _held(self) -> Any:
        return self._open, self._made_with.arrays()

    def _in_this_thread(self) -> AbstractContextManager[None]:
        """Make the calls of the block in the calling thread, and none in the node's own."""
        self._context.backend.make_current()
        agreement: Agreement = self._context.agreement
        return agreement.in_this_thread()

    def _drop(self) -> None:
        self._made_with, self._open = MadeWith(()), None

    def _let_go(self) -> bool:
        self._made_with.release()
        return True

    def __repr__(self) -> str:
        """Name the plan, its fields and its routes."""
        return f"<mpishare.{self.name}: {self._describe()}{self._state()}>"

    def _describe(self) -> str:
        fields = f"fields={name_fields(self._setup.mine)}"
        if self._takes_any:
            fields = f"any fields, {len(self._fields.setups) - 1} seen"
        return f"{fields}, routes={self._named_routes()}"

    def _begin(self, call: str, fields: Sequence[Any], stream: Any) -> tuple[Engine, Any]:
        """Return the engine of a call and its prepared fields."""
        fields = self._enter(call, fields)
        engine = self._fields.pair_for(call, fields, stream).forward
        return engine, self._prepare(call, engine, fields)

    def _enter(self, call: str, fields: Sequence[Any]) -> Sequence[Any]:
        """Return the fields of a call, or raise if the plan cannot be called now."""
        self._check_free(call)
        if fields:
            self._made_with.release()
        fields = fields or self._made_with.arrays()
        if not fields:
            why = (
                "the arrays that the plan was made with are gone, since nobody holds them. Pass "
                "those that are there"
                if len(self._made_with)
                else "the plan was made for a Layout and has no arrays. Pass them"
            )
            raise TypeError(f"{self.name}: {call} failed: {why}: {call}(u)")
        return fields

    def _prepare(self, call: str, engine: Engine, fields: Sequence[Any]) -> Any:
        try:
            return engine.prepare(fields)
        except (TypeError, ValueError) as error:
            raise self._named(call, error) from None

    @property
    def _engines(self) -> list[Engine]:
        return self._fields.engines

    @property
    def _setups(self) -> list[RoutedSetup]:
        return self._fields.setups

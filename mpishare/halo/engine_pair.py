"""The engines of a plan for fields of agreed layouts: of its exchange, and of the reverse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from mpishare.halo.setup import agree_on_routes, make_engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.halo.engine import Engine, PlanSetup
    from mpishare.halo.message import Message


class EnginePair:
    """Moves fields whose layouts all ranks have agreed on. Collective to make, host-blocking.

    Parameters
    ----------
    setup : PlanSetup
        What the ranks agreed on.
    sends, recvs : sequence of Message
        What this rank sends and receives.

    Attributes
    ----------
    forward : Engine
        Of the exchange.
    reverse : Engine or None
        Of the reverse, once it is used.
    """

    def __init__(
        self, setup: PlanSetup, sends: Sequence[Message], recvs: Sequence[Message]
    ) -> None:
        agree_on_routes(setup, sends, recvs)
        self.setup = setup
        self._sends, self._recvs = sends, recvs
        setup.fields = []
        self.forward = make_engine(setup, sends, recvs, is_reverse=False)
        self.reverse: Engine | None = None

    def make_reverse(self) -> Engine:
        """Return the engine of the reverse; the first time, build it: collective, host-blocking."""
        name = self.setup.name
        unfit = [str(each.dtype) for each in self.setup.mine if each.dtype.kind not in "iufc"]
        if unfit:
            raise TypeError(f"{name}: accumulate failed: {', '.join(unfit)} cannot be added")
        if self.reverse is None:
            self.reverse = make_engine(self.setup, self._recvs, self._sends, is_reverse=True)
        return self.reverse

    def pair_for(self, call: str, fields: Sequence[Any], stream: Any) -> Self:  # noqa: ARG002
        """Return itself; see `AnyFields`. The engines check the fields."""
        return self

    def has_seen(self, fields: Sequence[Any]) -> bool:  # noqa: ARG002
        """Return True."""
        return True

    @property
    def engines(self) -> list[Engine]:
        """Those that are there."""
        return [self.forward] if self.reverse is None else [self.forward, self.reverse]

    @property
    def setups(self) -> list[PlanSetup]:
        """What is to be closed after the engines."""
        return [self.setup]

"""The engines of a plan for fields of agreed layouts: forward, reverse, and both ways."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from mpishare.memory.numbers import why_not_added
from mpishare.plans.layout import require_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.plans.engine import FieldsCall, PlanSetup, RoutedSetup
    from mpishare.plans.exchange.cuda.engine import CudaEngine
    from mpishare.plans.exchange.host.engine import HostEngine
    from mpishare.plans.layout import Layout

    Engine: TypeAlias = HostEngine | CudaEngine


class EnginePair:
    """Engines for fields of agreed layouts; the reverse, which `adds`, is made at its first use.

    So is the call that gives back what was added.

    Collective to make, host-blocking.
    """

    def __init__(self, setup: RoutedSetup, *, adds: bool = True) -> None:
        self.setup, self._adds = setup, adds
        self.forward = engine_class(setup)(setup)
        self.reverse: Engine | None = None
        self._both: Engine | None = None
        self.giving_back: FieldsCall | None = None

    def require_reverse(self) -> None:
        """Raise `TypeError` if elements cannot be added: on the ranks that have such fields."""
        added = self.setup.mine if self._adds else ()
        if unfit := [*filter(None, (why_not_added(each.dtype) for each in added))]:
            raise TypeError(f"{self.setup.name}: accumulate failed: {', '.join(unfit)}")

    def make_reverse(self) -> Engine:
        """Return the reverse engine, made at the first call: collective, host-blocking then."""
        if self.reverse is None:
            self.require_reverse()
            turned = self.setup.turned(adds=self._adds)
            self.reverse = engine_class(turned)(turned)
        return self.reverse

    def make_giving_back(self) -> FieldsCall:
        """Return the call that adds and gives the sums back: as `make_reverse`."""
        if self.giving_back is None:
            self.require_reverse()
            self._both = self.forward.both_ways()
            if self._both is None:
                self.make_reverse()
            self.giving_back = self._in_turn if self._both is None else self._both.exchange
        return self.giving_back

    def _in_turn(self, fields: Sequence[Any], stream: Any) -> None:
        """Add by the reverse, then exchange, which gives the sums back."""
        self.make_reverse().exchange(fields, stream)
        try:
            self.forward.exchange(fields, stream)
        except BaseException as error:  # the others wait for this rank
            self.setup.context.life.leave(f"{self.setup.name}: accumulate", error)
            raise

    def pair_for(self, call: str, fields: Sequence[Any], stream: Any) -> Self:  # noqa: ARG002
        """Return itself, as `AnyFields` would; the engines check the fields."""
        return self

    def has_seen(self, fields: Sequence[Any]) -> bool:  # noqa: ARG002
        return True

    def require_like(self, fields: Sequence[Layout]) -> None:
        """Raise `ValueError` unless such fields, in the memory of the plan's, are the plan's."""
        mine = self.setup.mine
        require_number(fields, len(mine))
        for number, (given, layout) in enumerate(zip(fields, mine, strict=True)):
            layout.require(replace(given.of_field(), device=layout.device), f"field {number}")

    @property
    def engines(self) -> list[Engine]:
        made = self.forward, self.reverse, self._both
        return [each for each in made if each is not None]

    @property
    def setups(self) -> list[RoutedSetup]:
        return [self.setup]


def engine_class(setup: PlanSetup) -> type[Engine]:
    """Import the engine for the backend of the fields; making one is collective, host-blocking."""
    if setup.on_gpu:
        from mpishare.plans.exchange.cuda.engine import CudaEngine

        return CudaEngine
    from mpishare.plans.exchange.host.engine import HostEngine

    return HostEngine

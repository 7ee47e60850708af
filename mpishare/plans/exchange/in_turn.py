"""Two calls in one: the reverse, then the exchange, which gives the sums back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.coordination.agreement import Agreement
    from mpishare.plans.engine import Engine, FieldsCall


def in_turn(name: str, agreement: Agreement, reverse: Engine, forward: Engine) -> FieldsCall:
    """Return the call of both."""

    def call(fields: Sequence[Any], stream: Any) -> None:
        reverse.exchange(fields, stream)
        try:
            forward.exchange(fields, stream)
        except BaseException as error:  # the others wait for this rank
            agreement.leave(f"{name}: accumulate", error)
            raise

    return call

"""Two engines in one call: the reverse, then the exchange, which gives the sums back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.plans.engine import PlanEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.coordination.agreement import Agreement
    from mpishare.plans.engine import Engine
    from mpishare.plans.gpu.graphs import GraphCache


class InTurn(PlanEngine):
    """The reverse, then the exchange.

    `try_both` makes both at once, or returns False with nothing done; `graphs` are its own.
    """

    staging_nbytes = 0

    def __init__(
        self,
        reverse: Engine,
        forward: Engine,
        agreement: Agreement,
        try_both: Callable[[Sequence[Any], Any], bool] | None = None,
        graphs: GraphCache | None = None,
    ) -> None:
        self._reverse, self._forward, self._agreement = reverse, forward, agreement
        self._try_both, self._graphs = try_both, graphs

    def exchange(self, fields: Sequence[Any], stream: Any) -> None:
        """Add what comes back, then bring the sums; in between the others wait for this rank."""
        if self._try_both is not None and self._try_both(fields, stream):
            return
        self._reverse.exchange(fields, stream)
        try:
            self._forward.exchange(fields, stream)
        except BaseException as error:
            self._agreement.leave("accumulate", error)
            raise

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.close()

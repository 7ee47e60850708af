"""A captured function on the host backend: a plain call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.graphs.arguments import check_result

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.coordination.agreement import Agreement


class HostRuns:
    """Calls a function, once or until it is done."""

    def __init__(
        self,
        agreement: Agreement,
        name: str,
        function: Callable[..., Any],
        until: Callable[..., Any] | None,
        at_most: int,
    ) -> None:
        self._agreement = agreement
        self._name = name
        self._function = function
        self._until = until
        self._at_most = at_most
        self.iterations = None if until is None else np.zeros(1, np.int64)

    def bind(self) -> Callable[[Sequence[Any]], Any]:
        return self.run

    def run(self, arguments: Sequence[Any]) -> Any:
        self._agreement.check()
        made = 0
        while True:
            result = check_result(self._name, self._function(*arguments), scalars=np.generic)
            made += 1
            # Called after the last run too: it may be collective.
            if self._until is None or self._ask(self._until(*arguments)) or made == self._at_most:
                break
        if self.iterations is not None:
            self.iterations[0] = made
        return result

    def _ask(self, answer: Any) -> bool:
        """Return whether the loop is done; `TypeError` for a result that no graph could read."""
        is_array = isinstance(answer, np.generic) or hasattr(answer, "__dlpack__")
        done = np.asarray(answer) if is_array else None
        if done is None or done.size != 1 or done.dtype.kind not in "biu":
            raise TypeError(
                f"{self._name} failed: until returned {answer!r}, not an array of one boolean or "
                "integer"
            )
        return bool(done.any())

    def close(self) -> None:
        """Do nothing: a plain call has no graphs."""

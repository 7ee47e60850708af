"""A captured function on the host backend: it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.graphs.arguments import check_result

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class HostRuns:
    """Calls a function, once or until it is done. Local.

    Parameters
    ----------
    name : str
        For errors.
    function : callable
        What is called.
    until : callable or None
        Whether it is done.
    at_most : int
        How often it is called at most.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        until: Callable[..., Any] | None,
        at_most: int,
    ) -> None:
        self._name = name
        self._function = function
        self._until = until
        self._at_most = at_most
        self.iterations = None if until is None else np.zeros(1, np.int64)

    def run(self, arguments: Sequence[Any]) -> Any:
        """Call it."""
        made = 0
        while True:
            result = check_result(self._name, self._function(*arguments))
            made += 1
            # Asked after the last run too: it may be a collective call.
            is_done = self._until is None or bool(self._until(*arguments))
            if is_done or made == self._at_most:
                break
        if self.iterations is not None:
            self.iterations[0] = made
        return result

    def close(self) -> None:
        """Do nothing: nothing was made."""

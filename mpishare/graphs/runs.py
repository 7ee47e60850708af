"""The runs of a captured function: plain calls on the host backend; the base of those on CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.runtime.context import NodeContext


class Work(NamedTuple):
    """A function, and what ends its loop."""

    function: Callable[..., Any]
    until: Callable[..., Any] | None
    at_most: int


class Runs:
    """Calls a function, once or until it is done."""

    _scalars: type | tuple[type, ...] = np.generic  # results that are no arrays
    _memory_of_answers = ""  # those of `until`, in errors

    def __init__(self, context: NodeContext, name: str, work: Work) -> None:
        self._context, self._name = context, name
        self._function, self._until, self._at_most = work
        self.iterations: Any = None if work.until is None else np.zeros(1, np.int64)

    def bind(self) -> Callable[[Sequence[Any]], Any]:
        """Return a function of a tuple of arguments with the effect of the captured one."""
        return self.run

    def run(self, arguments: Sequence[Any]) -> Any:
        self._context.agreement.check()
        made = 0
        while True:
            result = self._call(arguments)
            made += 1
            # Called after the last run too: it may be collective.
            if self._until is None or self._ask(arguments).any() or made == self._at_most:
                break
        if self.iterations is not None:
            self.iterations[0] = made
        return result

    def _call(self, arguments: Sequence[Any]) -> Any:
        """Return the result of the function; `TypeError` if a replay could not renew it."""
        result = self._function(*arguments)
        self._check_result(result)
        return result

    def _check_result(self, result: Any) -> None:
        if result is None or hasattr(result, "__dlpack__") or isinstance(result, self._scalars):
            return
        if not isinstance(result, (tuple, list, dict)):
            raise TypeError(
                f"{self._name} failed: the function returned {result!r}, which no replay would "
                "compute again. Return arrays, or nothing."
            )
        for each in result.values() if isinstance(result, dict) else result:
            self._check_result(each)

    def _ask(self, arguments: Sequence[Any]) -> Any:
        """Return the array of one element by which `until` ends the loop, or raise `TypeError`."""
        answer: Any = self._until(*arguments) if self._until is not None else None
        done = self._as_array(answer)
        if done is None or done.size != 1 or done.dtype.kind not in "biu":
            raise TypeError(
                f"{self._name} failed: until returned {answer!r}, not an array of one boolean or "
                f"integer{self._memory_of_answers}, as error[0] < 1e-6 gives"
            )
        return done

    def _as_array(self, answer: Any) -> Any:
        """Return an answer as an array, or None for one that no graph could read."""
        is_array = isinstance(answer, np.generic) or hasattr(answer, "__dlpack__")
        return np.asarray(answer) if is_array else None

    def is_over(self) -> bool:
        """Whether the work is done that its runs have enqueued."""
        return True

    def close(self) -> None:
        """Free graphs and memory: a plain call has none."""

"""Calls with the very arrays of an earlier call: what was prepared for that one is launched again.

Beside `replay`, for calls that take more than the fields of a plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import cupy

from mpishare.backends.cuda_graphs import Replay
from mpishare.backends.driver import launch_graph
from mpishare.plans.layout import is_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.backends.driver import Enqueued

_MAX_SEEN = 64


class SeenCalls:
    """What was made for earlier calls, by the `key` that C makes of them.

    In it are the ids of arrays: with an array goes what was made for it, since its id may be used
    once more. The places of tensors, which may be set, are compared.
    """

    def __init__(self) -> None:
        self._seen: dict[Any, _Seen] = {}
        self._gone: list[Repeated] = []  # to be closed

    def get(self, key: Any, arrays: Sequence[Any]) -> Repeated | None:
        """Return what was made for these arrays, if they are as they were."""
        found = self._seen.get(key)
        if found is None or (found.places and found.places != _places_of(arrays)):
            return None
        return found.made

    def put(self, key: Any, arrays: Sequence[Any], made: Repeated) -> None:
        """Remember what was made, if these are arrays of CuPy or PyTorch."""
        if not all(isinstance(each, cupy.ndarray) or is_tensor(each) for each in arrays):
            return
        seen, gone = self._seen, self._gone

        def forget(key: Any) -> None:
            if (old := seen.pop(key, None)) is not None:
                gone.append(old.made)
                old.refs.clear()  # which tell no more

        forget(key)
        if len(seen) >= _MAX_SEEN:
            forget(next(iter(seen)))
        self._close_gone()
        refs = [ref(each, lambda _: forget(key)) for each in arrays]
        seen[key] = _Seen(made, _places_of(arrays), refs)

    def clear(self) -> None:
        while self._seen:
            self._gone.append(self._seen.popitem()[1].made)
        self._close_gone()

    def _close_gone(self) -> None:
        while self._gone:
            self._gone.pop().close()


class _Seen(NamedTuple):
    made: Repeated
    places: list[Any]
    refs: list[Any]


def _places_of(arrays: Sequence[Any]) -> list[Any]:
    """Return where the memory of tensors is, and how it lies, which may be set."""
    return [(each.data_ptr(), each.stride()) for each in arrays if is_tensor(each)]


class Repeated:
    """Launches of a call that may come again: as a graph, in a third of the time.

    The graph is captured on the stream `capturing`. It is for the `ints` that came twice in a row
    first; with others the launches are made one by one.
    """

    ints: tuple[int, ...] | None = ()  # arguments; None where the last ones were refused
    is_changed = False  # since the last call
    tensors_on: int | None = None  # the GPU of the call's tensors, if the stream is theirs

    def __init__(self, launches: Sequence[Enqueued], capturing: int, where: str) -> None:
        self.launches, self._capturing, self._where = launches, capturing, where
        self._graph: Replay | None = None
        self._ints_of_graph: Any = None

    def enqueue(self, stream: int) -> None:
        for each in self.launches:
            each.enqueue(stream)

    def repeat(self, stream: int) -> None:
        if self._graph is None and not self.is_changed:
            self._graph = Replay(self, self._capturing, self._where)
            self._ints_of_graph = self.ints
        if self._graph is not None and self.ints == self._ints_of_graph:
            launch_graph(self._graph.handle, stream, self._where)
        else:
            self.enqueue(stream)
        self.is_changed = False

    def set(self, ints: tuple[int, ...]) -> None:
        """Take other ints, in the order in which the call has them."""
        raise NotImplementedError

    def close(self) -> None:
        if self._graph is not None:
            self._graph.close()
            self._graph = None

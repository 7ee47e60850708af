"""Objects made from a node, which holds them weakly until they are dropped."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from mpishare.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.coordination.dropped import Dropped

Item = TypeVar("Item")


class NotPicklable:
    """A class whose objects cannot be pickled: handles and mappings belong to one process."""

    def __reduce__(self) -> Any:
        raise TypeError(
            f"an mpishare {type(self).__name__} cannot be pickled: it belongs to one process"
        )


class NodeObject(NotPicklable):
    """An object made from a node and closed with it: a window, an event, a plan.

    It registers with its context when it is complete, and unregisters when it is closed. Once all
    its ranks have dropped it, it is closed too; see `Dropped`. Methods for the context begin with
    an underscore, so that users see only theirs.
    """

    name: str
    _number: int = 0  # of a window
    _context: Any  # the `NodeContext`
    _registration: Registration | None = None
    _is_closed = False
    _closes_first = False  # a plan: its fields may lie in windows
    _memories: Sequence[Any] = ()  # of a window: each rank's segment

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._is_closed

    def close(self) -> None:
        """Close it on all ranks. Collective, host-blocking; closing twice has no effect."""
        raise NotImplementedError

    def _abandon(self) -> None:
        """Mark it closed without the other ranks; free no memory that they may still use."""
        raise NotImplementedError

    def _pending(self) -> list[int]:
        """Return the ranks whose signals the work enqueued by this rank waits for."""
        return []

    def _let_go(self) -> bool:
        """Return whether this rank, having dropped the object, uses none of its views any more."""
        return True

    def __del__(self) -> None:
        """Register as dropped, in any thread; frees no memory."""
        if self._registration is not None and not self._is_closed:
            self._registration.note(self)  # a strong reference from here on, until it is closed

    def _finish_at_exit(self, deadline: float) -> None:
        """Publish at process exit whether all work that began is over by the deadline."""

    def _state(self) -> str:
        """Return the state for the `repr` of an object that cannot be used."""
        if self._is_closed:
            return ", closed"
        return "" if self._context.agreement.failure is None else ", of a broken node"

    def __enter__(self) -> Self:
        """Return the object; raises if it is closed."""
        self._context.agreement.check()
        if self._is_closed:
            raise ClosedError(f"{self.name} is closed")
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Close the object; after an exception leave that to the node, without waiting for ranks.

        Other ranks may be gone then, and the exception must not be masked.
        """
        if error is None:
            self.close()


class Registration(NamedTuple):
    """An object's entry among the children of its node."""

    # In the order in which this rank has registered objects.
    place: int
    # Dropped objects of its ranks; None for a part of another object, which closes it.
    dropped: Dropped | None
    # Its number in `dropped`.
    number: int
    # Makes the reference to the object strong again; called in any thread.
    note: Callable[[Any], None]


class Children:
    """The registered objects of one rank. All methods but `registered` are for the main thread.

    A strong reference would keep an object from being dropped. So the node holds it weakly until
    its finalizer has run, then strongly until all its ranks have closed it.
    """

    def __init__(self) -> None:
        self._last = 0
        self._by_place: dict[int, Callable[[], Any]] = {}
        self._noted: list[Any] = []  # appended to by finalizers, in whatever thread

    def add(self, child: Any, dropped: Dropped | None) -> None:
        """Register an object of the ranks that share `dropped`."""
        self._last += 1
        number = 0 if dropped is None else dropped.next_number()
        child._registration = Registration(self._last, dropped, number, self._noted.append)
        self._by_place[self._last] = weakref.ref(child)

    def remove(self, child: Any) -> None:
        place, dropped, number, _ = child._registration
        child._registration = None
        del self._by_place[place]
        if dropped is not None:
            dropped.forget(number)

    def registered(self) -> list[Any]:
        """Return the open objects, the oldest first; also called in the watchdog's thread."""
        found = {place: child() for place, child in list(self._by_place.items())}
        # The garbage collector ends weak references before it calls finalizers.
        for child in list(self._noted):
            if (registration := child._registration) is not None:
                found[registration.place] = child
        return [found[place] for place in sorted(found) if found[place] is not None]

    def note_dropped(self) -> None:
        """Pass the objects whose finalizers have run on to `Dropped`."""
        while self._noted:
            child = self._noted[-1]
            if (registration := child._registration) is not None:
                self._by_place[registration.place] = partial(_same, child)
                if registration.dropped is not None:
                    registration.dropped.add(registration.number, child)
            self._noted.remove(child)


def _same(child: Item) -> Item:
    return child

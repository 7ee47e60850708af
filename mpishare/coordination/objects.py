"""Objects made from a node: held weakly until they are dropped, and closed by all ranks together.

Python finds an object unreachable at any time, in any thread, and on each rank at another moment;
closing it is collective. So a rank only notes it, and publishes its number with the next agreement.
When the numbers of all ranks are there, all of them close the object.
"""

from __future__ import annotations

import weakref
from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

from mpishare.coordination.abort import say_error
from mpishare.errors import ClosedError, closed, is_failing_exit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class NodeObject:
    """An object made from a node and closed with it: a window, an event, a plan; or the node.

    It registers with its context when it is complete, and unregisters when it is closed. It is held
    weakly until its finalizer has run, then strongly; once all its ranks have dropped it, it is
    closed too, see `Dropped`. Methods for the context begin with an underscore, so that users see
    only theirs.
    """

    name: str
    _kind = "object"  # in errors
    _number: int = 0  # of a window
    _context: Any  # the `NodeContext`
    _children: Children | None = None  # while it is registered
    _place: int = 0  # among these
    _dropped: Dropped | None = None  # None for what not all ranks close that have dropped it
    _drop_number: int = 0
    _is_closed = False
    _is_local = False  # a captured function: each rank closes it by itself
    _closes_first = False  # a plan: its fields may lie in windows
    _outlives_python = False  # a plan: its calls under way end after the interpreter does
    _has_kernels = False  # kernels of users wait in it: `_check_kernels` has something to check
    _memories: Sequence[Any] = ()  # of a window: each rank's segment

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._is_closed

    def __reduce__(self) -> Any:
        raise TypeError(
            f"an mpishare {type(self).__name__} cannot be pickled: it belongs to one process"
        )

    def close(self) -> None:
        """Close it on all ranks. Collective, host-blocking; closing twice has no effect."""
        raise NotImplementedError

    def _abandon(self) -> None:
        """Mark it closed without the other ranks; free no memory that they may still use."""
        raise NotImplementedError

    def _pending(self) -> list[int]:
        """Return the ranks whose signals the work enqueued by this rank waits for."""
        return []

    def _check_kernels(self) -> None:
        """Break the node if a wait in a kernel has failed. The watchdog's thread calls it too."""

    def _check_elsewhere(self) -> None:
        """Break the node if a rank of another node is lost or late. In the watchdog's thread."""

    def _late_elsewhere(self, call: str) -> Exception | None:  # noqa: ARG002
        """Return the error of ranks of other nodes that this rank's stream waits for, if any."""
        return None

    def _let_go(self) -> bool:
        """Return whether this rank, having dropped the object, uses none of its views any more."""
        return True

    def __del__(self) -> None:
        """Register as dropped, in any thread; frees no memory."""
        if self._children is not None and not self._is_closed:
            self._children.hold(self)

    def _is_over(self) -> bool:
        """Return whether the work is done that this rank's calls have enqueued."""
        return True

    def _closed(self, call: str) -> ClosedError:
        """Return the error of a call after `close`; its name begins with that of the object."""
        return ClosedError(f"{call} failed: the {self._kind} is closed")

    def _state(self) -> str:
        """Return the state for the `repr` of an object that cannot be used."""
        if self._is_closed:
            return ", closed"
        return "" if self._context.life.failure is None else ", of a broken node"

    def __enter__(self) -> Self:
        """Return the object; raises if it is closed."""
        self._context.agreement.check()
        if self._is_closed:
            raise closed(self.name)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Close the object; after an exception leave that to the node, and publish the exception.

        Without waiting: other ranks may be gone then, and the exception must not be masked.
        """
        if error is None:
            self.close()
        elif not self._is_closed:
            if is_failing_exit(error):  # Python prints nothing of that
                say_error(error)
            self._leave(error)

    def _leave(self, error: BaseException) -> None:
        """End the node: this rank leaves the with block by an exception."""
        self._context.life.leave(f"the with block of {self.name}", error)


class Dropped:
    """The objects of one set of ranks, numbered alike on all, and the ranks that dropped each.

    For the thread that makes the collective calls.
    """

    def __init__(self) -> None:
        self._last = 0
        # Objects that this rank has dropped, and has not closed.
        self._here: dict[int, NodeObject] = {}
        self._unpublished: set[int] = set()
        # By how many ranks each was dropped, as far as that is published.
        self._count = Counter[int]()

    def next_number(self) -> int:
        """Return the number of a new object, the same on all ranks."""
        self._last += 1
        return self._last

    def add(self, number: int, item: NodeObject) -> None:
        self._unpublished.add(number)
        self._here[number] = item

    def forget(self, number: int) -> None:
        self._here.pop(number, None)
        self._unpublished.discard(number)
        self._count.pop(number, None)

    def ids(self) -> list[int]:
        """Return the numbers to publish: of dropped objects that are no longer in use."""
        if not self._unpublished:
            return []
        # Plans first: their fields may lie in windows.
        order = sorted(self._unpublished, key=lambda number: not self._here[number]._closes_first)
        return [number for number in order if self._here[number]._let_go()]

    def close(self, published: Sequence[Sequence[int]], rank: int) -> None:
        """Close the objects that all ranks have dropped by now. Collective, host-blocking.

        `published` is the result of `ids` on each rank, with this rank's at `rank`.
        """
        if not any(published):
            return
        self._unpublished.difference_update(published[rank])
        self._count.update(chain.from_iterable(published))
        gone = [number for number, count in self._count.items() if count == len(published)]
        for number in gone:
            del self._count[number]
        newest_first = [self._here[number] for number in sorted(gone, reverse=True)]
        for item in sorted(newest_first, key=lambda item: not item._closes_first):  # plans first
            item.close()  # no effect where another object has closed it


class Children:
    """The registered objects of one rank. `registered` and `hold` are for any thread."""

    def __init__(self) -> None:
        # In the order in which this rank registered them; of one amid its end there is None, as
        # weak references end before finalizers run.
        self._items: dict[int, Callable[[], NodeObject | None]] = {}
        self._last = 0
        self._held: list[NodeObject] = []
        self.kernels = 0  # how many of them have kernels of users that wait

    def add(self, child: NodeObject, dropped: Dropped | None) -> None:
        """Register an object of the ranks that share `dropped`."""
        self._last += 1
        child._children, child._place, child._dropped = self, self._last, dropped
        child._drop_number = 0 if dropped is None else dropped.next_number()
        self._items[self._last] = weakref.ref(child)
        self.kernels += child._has_kernels

    def remove(self, child: NodeObject) -> None:
        child._children = None
        self.kernels -= child._has_kernels
        del self._items[child._place]
        if child._dropped is not None:
            child._dropped.forget(child._drop_number)

    def registered(self) -> list[Any]:
        """Return the open objects, the oldest first."""
        return [item for get in list(self._items.values()) if (item := get()) is not None]

    def hold(self, child: NodeObject) -> None:
        """Note that an object was dropped, and hold it. Called by its finalizer."""
        self._items[child._place] = lambda: child
        self._held.append(child)

    @property
    def has_dropped(self) -> bool:
        """Whether `note_dropped` has anything to pass on."""
        return bool(self._held)

    def note_dropped(self) -> None:
        """Pass the objects whose finalizers have run on to `Dropped`, and close the local ones."""
        busy = []
        while self._held:
            child = self._held.pop()
            if child._children is None:
                continue  # it was closed since
            if child._dropped is not None:
                child._dropped.add(child._drop_number, child)
            elif child._is_local and not child._is_over():
                busy.append(child)
            elif child._is_local:
                child.close()
        self._held.extend(busy)  # for a later call

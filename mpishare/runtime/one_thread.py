"""One thread at a time makes nodes on a communicator.

MPI tells the collective calls on a communicator apart by their order alone: of threads that make
them at once, those of one rank would get the nodes of others.
"""

from __future__ import annotations

from contextlib import contextmanager
from threading import current_thread
from typing import TYPE_CHECKING

from mpishare.errors import UnsupportedError, mismatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from threading import Thread

    from mpi4py import MPI

_REMEDY = "Give each thread a communicator of its own: comm.Dup(), made by one thread."

# The thread of a call that is under way, by its communicator, and its name before those refused.
_under_way: dict[int, tuple[Thread, list[str]]] = {}


@contextmanager
def one_thread_on(comm: MPI.Comm, call: str) -> Iterator[list[str]]:
    """Refuse the calls of other threads on this communicator while the block runs.

    Yields the name of this thread, and behind it those of the ones that were refused.
    """
    key, mine = comm.handle, current_thread()
    new = mine, [mine.name]
    first, names = found = _under_way.setdefault(key, new)
    if first is not mine:
        names.append(mine.name)
        raise UnsupportedError(
            f"{call} failed: thread {first.name!r} makes a node on the same communicator as "
            f"this thread, {mine.name!r}, and each would get that of the other. {_REMEDY}"
        )
    try:
        yield names
    finally:
        if found is new:  # else a handler of a signal makes it, amid one of this thread
            del _under_way[key]


def refuse_mixed(call: str, names: Sequence[Sequence[str]], rank: int) -> None:
    """Raise on all ranks if different threads have met; `names` has those of `one_thread_on`.

    Where no rank has seen two at once, they may be ones that make their nodes in turn.
    """
    met = {r: each[0] for r, each in enumerate(names)}
    if len({*met.values()}) > 1 and any(len(each) > 1 for each in names):
        what = f"{call} failed: threads of the ranks have made it at once on one communicator"
        raise mismatch(what, met, rank, "called it in", _REMEDY)

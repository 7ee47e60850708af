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

# The threads of a call that is under way, by its communicator; behind the first those refused.
_under_way: dict[int, list[Thread]] = {}


@contextmanager
def one_thread_on(comm: MPI.Comm, call: str) -> Iterator[Sequence[Thread]]:
    """Refuse the calls of other threads on this communicator while the block runs.

    Yields this thread, and behind it those that were refused.
    """
    mine, new = current_thread(), [current_thread()]
    threads = _under_way.setdefault(comm.handle, new)
    if threads[0] is not mine:
        threads.append(mine)
        raise UnsupportedError(
            f"{call} failed: thread {threads[0].name!r} makes a node on the same communicator as "
            f"this thread, {mine.name!r}, and each would get that of the other. {_REMEDY}"
        )
    key = comm.handle
    try:
        yield threads
    finally:
        if threads is new:  # else a handler of a signal makes it, amid one of this thread
            del _under_way[key]


def refuse_mixed(call: str, names: Sequence[Sequence[str]], rank: int) -> None:
    """Raise on all ranks if different threads have met; `names` has those of `one_thread_on`.

    Where no rank has seen two at once, they may be ones that make their nodes in turn.
    """
    met = {r: each[0] for r, each in enumerate(names)}
    if len({*met.values()}) > 1 and any(len(each) > 1 for each in names):
        what = f"{call} failed: threads of the ranks have made it at once on one communicator"
        raise mismatch(what, met, rank, "called it in", _REMEDY)

"""Try a library with little: a program that may end in a segmentation fault or never.

It imports nothing of mpishare, and ends with exit status 0 where every word arrived:
``python trial.py FILE FUNCTION NAME RANK SIZE ORDINAL`` is one of SIZE ranks that share a GPU,
which find each other by NAME and send words around in a ring. The function of the file connects
them, as `nccl` here does.
"""

from __future__ import annotations

import resource
import runpy
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

Send = Callable[[slice], None]
"""Sends these words to the next rank and receives those of the one before, stream-ordered."""

#: Libraries move small, middle and large messages in different ways.
_SIZES = (8, 64 << 10, 4 << 20)


def nccl(name: bytes, rank: int, size: int, words: Any, stream: int) -> Send:
    """Connect the ranks by NCCL, and return what sends and receives."""
    from cupy.cuda import nccl as calls

    is_bytes = isinstance(calls.get_unique_id(), bytes)  # until CuPy 13 a tuple of numbers
    own = name if is_bytes else tuple(np.frombuffer(name, "i1").tolist())
    comm = calls.NcclCommunicator(size, own, rank)
    out, into = words

    def send(part: slice) -> None:
        calls.groupStart()
        for call, memory, peer in ((comm.send, out, rank + 1), (comm.recv, into, rank - 1)):
            view = memory[part]
            call(int(view.data.ptr), view.size, calls.NCCL_UINT64, peer % size, stream)
        calls.groupEnd()

    return send


def _ring(file: str, function: str, name: str, rank: str, size: str, number: str) -> int | None:
    import cupy

    cupy.cuda.Device(int(number)).use()
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.use()
    me, ranks = int(rank), int(size)
    ends = np.cumsum([0, *(nbytes // 8 for nbytes in _SIZES), 1]).tolist()
    *parts, last = [slice(*pair) for pair in pairwise(ends)]
    words = cupy.zeros((2, ends[-1]), "u8")
    words[0].fill(me + 1)
    connect = runpy.run_path(file)[function]
    send: Send = connect(bytes.fromhex(name), me, ranks, words, int(stream.ptr))
    for part in parts:
        send(part)
    # After a word has gone around, every rank has what was sent to it: now one may end.
    for _ in range(ranks):
        send(last)
    right = [bool((words[1, part] == (me - 1) % ranks + 1).all()) for part in parts]
    return next((n for n, is_right in zip(_SIZES, right, strict=True) if not is_right), None)


def main(*arguments: str) -> int:
    """Send every size and return the exit status."""
    # A segmentation fault is an expected result: no core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    wrong = _ring(*arguments)
    if wrong is not None:
        sys.stderr.write(f"a message of {wrong} bytes arrived with wrong words\n")
    return int(wrong is not None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

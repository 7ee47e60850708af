"""Try a library on ranks that share a GPU with little: in children, since it may crash or hang.

The program imports nothing of mpishare, and ends with exit status 0 where every word arrived:
``python trial.py nccl|nccl4py|nvshmem NAME RANK SIZE ORDINAL`` is one of SIZE ranks that share a
GPU, which find each other by NAME and send words around in a ring.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mpishare.bench.library import Library
    from mpishare.bench.session import Session

Send = Callable[[slice], None]
"""Sends these words to the next rank and receives those of the one before, stream-ordered."""

#: Libraries move small, middle and large messages in different ways.
_SIZES = (8, 64 << 10, 4 << 20)


def _nccl(name: bytes, rank: int, size: int, words: Any, stream: int) -> Send:
    from cupy.cuda import nccl

    is_bytes = isinstance(nccl.get_unique_id(), bytes)  # until CuPy 13 a tuple of numbers
    own = name if is_bytes else tuple(np.frombuffer(name, "i1").tolist())
    comm = nccl.NcclCommunicator(size, own, rank)
    out, into = words

    def send(part: slice) -> None:
        nccl.groupStart()
        for call, memory, peer in ((comm.send, out, rank + 1), (comm.recv, into, rank - 1)):
            view = memory[part]
            call(int(view.data.ptr), view.size, nccl.NCCL_UINT64, peer % size, stream)
        nccl.groupEnd()

    return send


def _nccl4py(name: bytes, rank: int, size: int, words: Any, stream: int) -> Send:
    from nccl import core

    comm = core.Communicator.init(size, rank, core.UniqueId.from_bytes(name))
    out, into = (core.cupy.empty(words[0].size, "u8") for _ in range(2))
    windows = [comm.register_window(each, core.WindowFlag.COLL_SYMMETRIC) for each in (out, into)]
    arrival = core.WaitSignalDesc(peer=(rank - 1) % size)

    def send(part: slice) -> None:
        out[part] = words[0, part]
        to = (rank + 1) % size, windows[1], part.start
        comm.put_signal(out[part], *to, stream=stream)
        comm.wait_signal(arrival, stream=stream)
        words[1, part] = into[part]

    return send


def _nvshmem(name: bytes, rank: int, size: int, words: Any, stream: int) -> Send:
    import cupy
    from cuda.core import Device
    from nvshmem import bindings, core

    device = Device(cupy.cuda.Device().id)
    device.set_current()
    unique = core.get_unique_id(empty=True)
    unique._data.view(np.int8)[...] = np.frombuffer(name, np.int8)
    core.init(device=device, uid=unique, rank=rank, nranks=size, initializer_method="uid")
    into, signals = core.array((words[0].size,), dtype="uint64"), core.array((1,), dtype="uint64")
    signals.fill(0)
    bindings.barrier_all_on_stream(stream)  # they are 0 on all ranks before any rank puts
    put, wait = bindings.putmem_signal_on_stream, bindings.signal_wait_until_on_stream
    signal, step = int(signals.data.ptr), 0
    add, reached = int(core.SignalOp.SIGNAL_ADD), int(core.ComparisonType.CMP_GE)

    def send(part: slice) -> None:
        nonlocal step
        step += 1
        target, source = into[part], words[0, part]
        pointers = int(target.data.ptr), int(source.data.ptr)
        put(*pointers, target.nbytes, signal, 1, add, (rank + 1) % size, stream)
        wait(signal, reached, step, stream)
        words[1, part] = target

    return send


def _ring(program: str, name: str, rank: str, size: str, number: str) -> int | None:
    import cupy

    cupy.cuda.Device(int(number)).use()
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.use()
    me, ranks = int(rank), int(size)
    ends = np.cumsum([0, *(nbytes // 8 for nbytes in _SIZES), 1]).tolist()
    *parts, last = [slice(*pair) for pair in pairwise(ends)]
    words = cupy.zeros((2, ends[-1]), "u8")
    words[0].fill(me + 1)
    begin = {"nccl": _nccl, "nccl4py": _nccl4py, "nvshmem": _nvshmem}[program]
    send = begin(bytes.fromhex(name), me, ranks, words, int(stream.ptr))
    for part in parts:
        send(part)
    # After a word has gone around, every rank has what was sent to it: now one may end.
    for _ in range(ranks):
        send(last)
    right = [bool((words[1, part] == (me - 1) % ranks + 1).all()) for part in parts]
    return next((n for n, is_right in zip(_SIZES, right, strict=True) if not is_right), None)


#: Of each trial that was run: why it failed, or None.
_failures: dict[str, str | None] = {}


def try_sharing(session: Session, kind: type[Library]) -> str | None:
    """Return why the trial of a library failed on the first rank on which it did. Collective."""
    from mpishare.runtime.gpu_messages import run_in_child

    comm, number, program = session.comm, session.node.xp.cuda.Device().id, str(kind.shared_trial)
    if program not in _failures:
        name, reason = session.attempt(lambda: kind.unique_id() if comm.rank == 0 else None)
        if reason is None:
            arguments = program, comm.bcast(name).hex(), comm.rank, comm.size, number
            found = comm.allgather(run_in_child(Path(__file__), *arguments))
            reason = next((each for each in found if each is not None), None)
        _failures[program] = reason
    return _failures[program]


def main(program: str, *arguments: str) -> int:
    """Send every size and return the exit status."""
    # A segmentation fault is an expected result: no core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    wrong = _ring(program, *arguments)
    if wrong is not None:
        sys.stderr.write(f"a message of {wrong} bytes arrived with wrong words\n")
    return int(wrong is not None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

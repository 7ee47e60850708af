"""What ranks that share a GPU try of the newest libraries: see `mpishare.bench.trial`."""

from __future__ import annotations

from typing import Any

import numpy as np


def nccl4py(name: bytes, rank: int, size: int, words: Any, stream: int) -> Any:
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


def nvshmem(name: bytes, rank: int, size: int, words: Any, stream: int) -> Any:
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
    signal, add, reached = (
        int(signals.data.ptr),
        core.SignalOp.SIGNAL_ADD,
        core.ComparisonType.CMP_GE,
    )
    step = 0

    def send(part: slice) -> None:
        nonlocal step
        step += 1
        target, source = into[part], words[0, part]
        pointers = int(target.data.ptr), int(source.data.ptr)
        put(*pointers, target.nbytes, signal, 1, int(add), (rank + 1) % size, stream)
        wait(signal, int(reached), step, stream)
        words[1, part] = target

    return send

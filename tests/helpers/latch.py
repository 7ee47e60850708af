"""Hold the producer, look whether a consumer passes, let go: how order between ranks is tested.

Without a held producer a missing wait passes by luck.
"""

import ctypes
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from mpishare import Node
from mpishare.plans.node_cache import context_of

_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ


class Latch:
    """Holds CUDA streams until `release`: they wait for a word of pinned memory of this process."""

    def __init__(self) -> None:
        import cupyx

        self._word = cupyx.zeros_pinned((1,), "u8")
        self._wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue64_v2
        self._wait.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint]

    def hold(self, stream: int) -> None:
        """Let what comes next on that stream wait."""
        # Pinned memory has one address for the CPU and the GPU.
        code = self._wait(stream, self._word.ctypes.data, 1, _AT_LEAST)
        assert code == 0, f"cuStreamWaitValue64 returned {code}"

    def release(self) -> None:
        self._word[0] = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.0005)
    return True


def waits_on_host(node: Node, rank: int) -> bool:
    """Whether that rank sits in a wait of the host, as the control block shows it."""
    return context_of(node).agreement.block.status(rank) is not None


def check_order(
    node: Node,
    array: object,
    producer: int,
    *,
    signal: Callable[[], None],
    wait: Callable[[], None],
    prepare: Callable[[], None] = lambda: None,
    finish: Callable[[], None] = lambda: None,
    value: int = 7,
    on_host: bool | None = None,
    patience_s: float = 0.03,
) -> None:
    """Hold rank `producer` before it writes `value`: nobody may pass `wait`, or read old data.

    Collective; raises AssertionError on every rank or on none. All ranks call `prepare`; then the
    producer writes `array` and calls `signal`, the others call `wait` and read `array`; then all
    call `finish`.

    Parameters
    ----------
    on_host : bool, optional
        The producer is held by the host until the others wait on the host; else its stream is held
        and the others' streams must not come to their end. Default: as the backend waits.
    patience_s : float
        How long to look whether a stream comes to its end too early.
    """
    if on_host is None:
        on_host = node.backend == "host"
    hold = _hold_on_host if on_host else _hold_stream
    node.comm.barrier()
    passed, found = hold(node, array, producer, prepare, signal, wait, value, patience_s)
    finish()
    told = node.comm.allgather((passed, found))
    others = [(rank, *told[rank]) for rank in range(node.size) if rank != producer]
    early = [rank for rank, has_passed, _ in others if has_passed]
    assert not early, f"ranks {early} passed while rank {producer} was held"
    stale = {rank: seen for rank, _, seen in others if seen != [value]}
    assert not stale, f"rank {producer} wrote {value}, other ranks read {stale}"


def _hold_on_host(node, array, producer, prepare, signal, wait, value, patience_s):
    comm, xp = node.comm, node.xp
    prepare()
    if node.rank != producer:
        wait()
        found = xp.unique(array)  # waits for the GPU
        comm.send(None, producer, tag=11)
        return False, found.tolist()
    others = [rank for rank in range(node.size) if rank != producer]
    # Either it waits, or it has passed already: no other way out, and no time is guessed.
    while not all(waits_on_host(node, r) or comm.Iprobe(source=r, tag=11) for r in others):
        time.sleep(0.001)
    array[...] = value
    signal()
    node.synchronize()
    for rank in others:
        comm.recv(source=rank, tag=11)
    return False, None


def _hold_stream(node, array, producer, prepare, signal, wait, value, patience_s):
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    found = cupy.empty_like(array)
    with Latch() as latch, stream:
        # A kernel's first use would wait behind the latch.
        found[...] = array
        cupy.empty_like(found)[...] = value
        stream.synchronize()
        prepare()
        if node.rank == producer:
            latch.hold(stream.ptr)
            array[...] = value
            signal()
        else:
            wait()
            found[...] = array
        node.barrier()
        passed = node.rank != producer and within(patience_s, lambda: stream.done)
        node.barrier()
        latch.release()
        node.synchronize(stream)
        return passed, sorted(set(found.ravel().get().tolist()))

"""NCCL through nccl4py: windows, puts with signals, and its interface for kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from ctypes import string_at
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from mpishare.bench.library import Transfer
from mpishare.bench.nccl import NcclCalls, set_environment
from mpishare.bench.session import Call, Session, in_turn

#: The first version with puts that signal.
_LEAST = (2, 29)
_BLOCK = 512
#: Thread blocks of all transfers: each waits for others.
_MAX_BLOCKS = 264
#: Up to how many words per block and in how many transfers each travels with a number beside it.
_FEW_BLOCKS, _FEW_TRANSFERS = 16, 8
#: A transfer as `nccl_windows.cuh` reads it, in words of 8 bytes.
_TRANSFER = [(name, "u8") for name in ("out", "into", "window", "offset", "words", "to")]


class NcclSend(NcclCalls):
    """Grouped sends and receives between windows."""

    label = "NCCL windows"
    shares_gpus = False

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        from nccl import core
        from nccl.bindings import nccl as calls

        self._core, self._calls = core, calls
        self.group = calls.group_start, calls.group_end
        self.calls = calls.send, calls.recv, calls.all_reduce, calls.all_gather
        self.kinds = int(core.UINT64), int(core.FLOAT64), int(core.SUM)
        #: Each allocation by its address, with the window that it is registered in.
        self._windows: dict[int, tuple[Any, Any]] = {}
        comm = session.comm
        name = comm.bcast(core.get_unique_id().as_bytes if comm.rank == 0 else None, 0)
        with self.refusals(calls.NCCLError):
            unique = core.UniqueId.from_bytes(bytes(name))
            self._comm = core.Communicator.init(comm.size, comm.rank, unique)
        self.rest = self._comm._comm, int(session.stream.ptr)

    @classmethod
    def require(cls, session: Session) -> None:  # noqa: ARG003
        set_environment()
        if find_spec("nccl") is None:
            raise cls.refusal("nccl4py is not installed")
        with cls.refusals(ImportError, OSError, RuntimeError):
            from nccl import core

            library = core.get_version().libnccl
        if library is None:
            raise cls.refusal("nccl4py finds no NCCL")
        if library.version.release < _LEAST:
            raise cls.refusal(f"NCCL {library.version} has no puts that signal")

    def empty(self, words: int) -> Any:
        with self.refusals(self._calls.NCCLError):
            memory = self._core.cupy.empty(words, "u8")
            memory.fill(0)
            window = self._comm.register_window(memory, self._core.WindowFlag.COLL_SYMMETRIC)
        self._windows[int(memory.data.ptr)] = memory, window
        return memory

    def free(self, memory: Any) -> None:
        self.session.synchronize()
        _, window = self._windows.pop(int(memory.data.ptr))
        window.close()

    def place(self, view: Any) -> tuple[Any, int]:
        """Return the window of a view, None where it is in none, and the bytes before it there."""
        address = int(view.data.ptr)
        for first, (memory, window) in self._windows.items():
            if first <= address < first + memory.nbytes:
                return window._window, address - first
        return None, 0

    def close(self) -> None:
        self.session.synchronize()
        self._comm.destroy()


class NcclPut(NcclSend):
    """A put with a signal per transfer, and a wait for the signals."""

    label = "NCCL put"
    halves = 2

    def bind(self, transfers: Sequence[Transfer], *, early: bool) -> Call:
        put, wait, signal = self._calls.put_signal, self._calls.wait_signal, self._calls.signal
        rest = 0, 0, 0, *self.rest  # signal, context, flags: one of each for now
        puts = [
            (int(e.out.data.ptr), e.words, self.kinds[0], e.to, *self.place(e.into), *rest)
            for e in transfers
        ]
        self.session.line_up()  # what `empty` wrote is there on all ranks before any rank puts
        if early:
            begin, end = self.group
            arrivals = self._waits([each.source for each in transfers])
            calls = (partial(put, *each) for each in puts)
            return in_turn(begin, *calls, end, partial(wait, *arrivals))
        # One after the other: in a graph a put waits until the put to the same rank before it was
        # waited for. The reader says first that it has read the words of the step before.
        steps = []
        for each, one in zip(transfers, puts, strict=True):
            steps.append(partial(signal, each.source, *rest))
            steps.append(partial(wait, *self._waits([each.to])))
            steps.append(partial(put, *one))
            steps.append(partial(wait, *self._waits([each.source])))
        return in_turn(*steps)

    def _waits(self, ranks: Sequence[int]) -> tuple[Any, ...]:
        """Return the arguments of a wait for one signal of each of these ranks."""
        kind = self._core.WaitSignalDesc
        counts = Counter(ranks).items()
        found = b"".join(bytes(kind(peer=r, op_count=n)._to_lowpp()) for r, n in counts)
        return len(counts), bytearray(found), *self.rest


class NcclDevice(NcclSend):
    """A kernel that stores into the windows of other ranks, with the barriers of NCCL for kernels.

    Words that land in no window come by one of two staging buffers in turn, and the same kernel
    copies them to where they belong.
    """

    label = "NCCL device"
    halves = 2
    is_direct = True

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        if session.node.size < session.comm.size:
            raise self.refusal("the ranks are on several nodes")
        headers = Path(self._core.get_version().libnccl.path).parents[1] / "include"
        if not (headers / "nccl_device.h").exists():
            raise self.refusal(f"{headers} has no nccl_device.h")
        xp = session.node.xp
        nbytes = int(self._calls.dev_comm_dtype.itemsize)
        options = "-std=c++17", f"-I{headers}", f"-DDEV_COMM_NBYTES={nbytes}"
        code = Path(__file__).with_suffix(".cuh").read_text()
        with self.refusals(RuntimeError, OSError, xp.cuda.compiler.CompileException):
            module = xp.RawModule(code=code, backend="nvcc", options=options)
            module.compile()
        #: A kernel of the file by its name.
        self.kernel: Callable[[str], Any] = module.get_function
        most = _FEW_TRANSFERS * _BLOCK + session.comm.size
        few = self._core.LLA2ARequirement(_FEW_BLOCKS, most, 8)
        needs = self._core.NCCLDevCommRequirements(lsa_barrier_count=_MAX_BLOCKS, resources=(few,))
        with self.refusals(self._calls.NCCLError):
            self._device_comm = self._comm.create_dev_comm(needs)
        state = string_at(int(self._device_comm.dev_comm.ptr), nbytes)
        #: A word that ends the waits of its kernels once it is not 0.
        self.is_given_up = xp.zeros(1, "u4")
        found = np.frombuffer(state, self._calls.dev_comm_dtype).copy()
        found["abort_flag"] = int(self.is_given_up.data.ptr)
        #: The first argument of each kernel: one element, which CuPy passes by value.
        self.state = found.view(f"V{nbytes}")
        (handle,) = self._device_comm.resource_handles
        #: Arguments of kernels whose words travel beside numbers.
        self.few = np.uint32(handle.buf_handle), np.uint32(handle.n_slots)

    def bind(self, transfers: Sequence[Transfer], *, early: bool) -> Call:
        session, xp = self.session, self.session.node.xp
        rows = np.zeros(len(transfers), _TRANSFER)
        rows["out"] = [int(each.out.data.ptr) for each in transfers]
        rows["words"] = [each.words for each in transfers]
        rows["to"] = [each.to for each in transfers]
        rows["into"] = [int(each.into.data.ptr) for each in transfers]
        most, count = max(each.words for each in transfers), np.int32(len(transfers))
        if most <= _FEW_BLOCKS * _BLOCK and count <= _FEW_TRANSFERS:
            words = self.state, xp.asarray(rows.view("u1")), count, *self.few
            session.line_up()  # all ranks are here before any of them spins
            return partial(self.kernel("exchange_words"), (-(-most // _BLOCK),), (_BLOCK,), words)
        places = [self.place(each.into) for each in transfers]
        is_staged = not all(window for window, _ in places)
        if is_staged:
            # An even number of words each, so that all copies are of 16 bytes where they can be.
            ends = np.cumsum([0, *(each.words + each.words % 2 for each in transfers)]).tolist()
            staging = self.empty(2 * ends[-1])
            window, _ = self.place(staging)
            places = [(window, 8 * end) for end in ends[:-1]]
        else:
            rows["into"] = 0
        rows["window"] = [window.handle for window, _ in places]
        rows["offset"] = [offset for _, offset in places]
        half = 8 * ends[-1] if is_staged else 0
        blocks = min(-(-most // (2 * _BLOCK)), _MAX_BLOCKS)  # a thread copies 2 words at a time
        table, steps = xp.asarray(rows.view("u1")), xp.zeros(blocks, "u4")
        is_ready_first = np.int32(not (early or is_staged))
        arguments = self.state, table, count, is_ready_first, np.int64(half), steps
        session.line_up()  # what `empty` wrote is there on all ranks before any rank stores
        return partial(self.kernel("exchange"), (blocks,), (_BLOCK,), arguments)

    def table(self, out: Any, into: Any, to: int) -> Any:
        """Return one transfer as kernels read it; what lands in a window is not copied there."""
        row = np.zeros(1, _TRANSFER)
        row["out"], row["words"], row["to"] = int(out.data.ptr), int(out.size), to
        window, row["offset"] = self.place(into)
        row["window"] = 0 if window is None else window.handle
        row["into"] = int(into.data.ptr) if window is None else 0
        return self.session.node.xp.asarray(row.view("u1"))

    def close(self) -> None:
        self.session.synchronize()
        self._device_comm.close()
        super().close()

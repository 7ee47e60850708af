"""The all-to-all of NCCL and of PyTorch between kernels that pack and unpack.

Its pieces have one size, by rank, this rank's own among them. *NCCL all-to-all* is `ncclAlltoAll`
between windows; *on copy engines* the same by a communicator that may use no thread blocks
(`NCCL_CTA_POLICY_ZERO`); *torch* is `all_to_all_single` of a process group of NCCL.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from mpi4py import MPI

from benchmarks.nccl_windows import NcclSend
from benchmarks.symmetric import TorchSymmetric
from mpishare.bench.comparison import Comparison
from mpishare.bench.copies import copy_all
from mpishare.bench.grid import ITEM_NBYTES, Call, Exchange, cut, split
from mpishare.bench.library import captured, open_library, refusals
from mpishare.bench.nccl import set_environment
from mpishare.bench.redistribute import Spread
from mpishare.bench.report import BASELINE
from mpishare.bench.session import Session
from mpishare.errors import UnsupportedError


def enter_alltoall(comparison: Comparison, problem: Spread) -> None:
    session = problem.session
    for name, kind in _LIBRARIES.items():
        library, refusal = open_library(session, kind)
        make: Any = partial(AllToAll, problem, library)
        for label, each in ((name, make), (f"{name} graph", captured(session, make))):
            comparison.add(label, each, kind=BASELINE, unfit=refusal)


class NcclAllToAll(NcclSend):
    """`ncclAlltoAll` between windows."""

    label = "NCCL all-to-all"

    def bind_all_to_all(self, out: Any, into: Any) -> Call:
        words, ends = int(out.size) // self.session.comm.size, (out, into)
        addresses = [int(each.data.ptr) for each in ends]
        call = self._calls.allto_all
        return partial(call, *addresses, words, self._type, self._handle, self._stream)


class NcclCopyEngines(NcclAllToAll):
    """The same without thread blocks."""

    label = "NCCL all-to-all on copy engines"

    def config(self) -> Any:
        return self._core.NCCLConfig(cta_policy=self._core.CTAPolicy.ZERO)


class TorchAllToAll(TorchSymmetric):
    """`torch.distributed.all_to_all_single`, on the stream of the bench."""

    label = "torch all_to_all_single"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        with refusals(self.label, RuntimeError):
            self._group = self._distributed.new_group(backend="nccl")

    @classmethod
    def require(cls, session: Session) -> None:
        super().require(session)
        set_environment(session)
        if session.ranks_per_gpu > 1:
            raise UnsupportedError(f"{cls.label}: its NCCL needs a GPU per rank")

    def empty(self, words: int) -> Any:
        return self.session.node.xp.zeros(words, "u8")

    def free(self, memory: Any) -> None:
        """Leave it to CuPy."""

    def bind_all_to_all(self, out: Any, into: Any) -> Call:
        tensors = [self._torch.from_dlpack(each.view("i8")) for each in (into, out)]
        with refusals(self.label, RuntimeError):
            self._distributed.all_to_all_single(*tensors, group=self._group)  # connects
        return partial(self._distributed.all_to_all_single, *tensors, group=self._group)


_LIBRARIES = {
    "nccl alltoall": NcclAllToAll,
    "nccl copy engines": NcclCopyEngines,
    "torch alltoall": TorchAllToAll,
}


class AllToAll(Exchange[Spread]):
    """Pack a piece for each rank, all of the size of the largest, exchange them, unpack."""

    def __init__(self, problem: Spread, library: Any) -> None:
        super().__init__(problem)
        self._library = library
        source, target = problem.fields[0], problem.cells(problem.fields[1])
        out_cells, into_cells = problem.by_rank()
        leaving = [source[cells] for cells in out_cells]
        arriving = [target[cells] for cells in into_cells]
        most = max(int(view.nbytes) // ITEM_NBYTES for view in leaving)
        sizes = [problem.comm.allreduce(most, MPI.MAX)] * problem.comm.size
        self._memory = [library.empty(sum(sizes)) for _ in range(2)]
        session, (out, into) = problem.session, self._memory
        packs, unpacks = (
            [
                (cut(part[: view.nbytes // ITEM_NBYTES], [view])[0], view)
                for part, view in zip(split(memory, sizes), views, strict=True)
            ]
            for memory, views in ((out, leaving), (into, arriving))
        )
        arrivals = [(view, place) for place, view in unpacks]
        move = library.bind_all_to_all(out, into)
        self._calls = copy_all(session, packs), move, copy_all(session, arrivals)

    def step(self) -> None:
        for call in self._calls:
            call()

    def close(self) -> None:
        self.problem.session.synchronize()
        del self._calls, self.fields
        while self._memory:
            self._library.free(self._memory.pop())

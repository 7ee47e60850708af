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
from mpishare.bench.grid import ITEM_NBYTES, Exchange, cut, split
from mpishare.bench.library import captured, open_library
from mpishare.bench.nccl import set_environment
from mpishare.bench.redistribute import Spread
from mpishare.bench.report import BASELINE
from mpishare.bench.session import Bound, Call, Session, in_turn


def enter_alltoall(comparison: Comparison, problem: Spread) -> None:
    session = problem.session
    for name, kind in _LIBRARIES.items():
        library, refusal = open_library(session, kind)
        make = partial(Exchange, problem, partial(_bind, library))
        for label, each in ((name, make), (f"{name} graph", captured(session, make))):
            comparison.add(label, each, kind=BASELINE, unfit=refusal)


class NcclAllToAll(NcclSend):
    """`ncclAlltoAll` between windows."""

    label = "NCCL all-to-all"

    def bind_all_to_all(self, out: Any, into: Any) -> Call:
        words, ends = int(out.size) // self.session.comm.size, (out, into)
        addresses = [int(each.data.ptr) for each in ends]
        call = self._calls.allto_all
        return partial(call, *addresses, words, self.kinds[0], *self.rest)


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
        with self.refusals(RuntimeError):
            self._group = self._distributed.new_group(backend="nccl")

    @classmethod
    def require(cls, session: Session) -> None:
        super().require(session)
        set_environment(session)
        if session.ranks_per_gpu > 1:
            raise cls.refusal("its NCCL needs a GPU per rank")

    def empty(self, words: int) -> Any:
        return self.session.node.xp.zeros(words, "u8")

    def free(self, memory: Any) -> None:
        """Leave it to CuPy."""

    def bind_all_to_all(self, out: Any, into: Any) -> Call:
        tensors = [self._torch.from_dlpack(each.view("i8")) for each in (into, out)]
        with self.refusals(RuntimeError):
            self._distributed.all_to_all_single(*tensors, group=self._group)  # connects
        return partial(self._distributed.all_to_all_single, *tensors, group=self._group)


_LIBRARIES = {
    "nccl alltoall": NcclAllToAll,
    "nccl copy engines": NcclCopyEngines,
    "torch alltoall": TorchAllToAll,
}


def _bind(library: Any, problem: Spread, source: Any, target: Any) -> Bound:
    """Bind a piece for each rank, all of the size of the largest, between kernels that pack."""
    session, (out_cells, into_cells) = problem.session, problem.by_rank()
    leaving = [source[cells] for cells in out_cells]
    arriving = [problem.cells(target)[cells] for cells in into_cells]
    most = max(int(view.nbytes) // ITEM_NBYTES for view in leaving)
    sizes = [problem.comm.allreduce(most, MPI.MAX)] * problem.comm.size
    out, into = (library.empty(sum(sizes)) for _ in range(2))
    packs, unpacks = (
        [
            (cut(part[: view.nbytes // ITEM_NBYTES], [view])[0], view)
            for part, view in zip(split(memory, sizes), views, strict=True)
        ]
        for memory, views in ((out, leaving), (into, arriving))
    )
    arrivals = [(view, place) for place, view in unpacks]
    move = library.bind_all_to_all(out, into)
    calls = copy_all(session, packs), move, copy_all(session, arrivals)
    free = in_turn(*(partial(library.free, memory) for memory in (into, out)))
    return in_turn(*calls), free

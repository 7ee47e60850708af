"""PyTorch's symmetric memory: copies into a neighbor's tensor, and its signals on the stream."""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpishare.bench.links.link import Library, refusals
from mpishare.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.bench.links.link import Link
    from mpishare.bench.session import Session

#: What it reads when it allocates. A copy gains nothing from multicast, and setting that up
#: concerns every GPU of the host, also those of others; memory of its own for each tensor, so that
#: places in it count from its begin.
_SETTINGS = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_SYMMMEM": "CUDA",
    "TORCH_SYMMMEM_IMPLICIT_POOL": "0",
}


class TorchSymmetric(Library):
    """A process group over all ranks of the run, which are those of one node.

    The group meets through a file that rank 0 makes, and talks by gloo, which leaves the GPU alone.
    Words alternate between two places, as with every library that writes into another rank's
    memory: the signal in between says that they were read.
    """

    label = "torch symmetric memory"
    halves = 2

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        import torch
        import torch.distributed._symmetric_memory as symmetric
        from torch import distributed

        self._torch, self._symmetric, self._distributed = torch, symmetric, distributed
        comm, number = session.comm, session.node.xp.cuda.Device().id
        self._device = torch.device("cuda", number)
        torch.cuda.set_device(self._device)
        # From here on what PyTorch does is on the stream of the bench.
        torch.cuda.set_stream(torch.cuda.ExternalStream(session.stream.ptr, self._device))
        folder = tempfile.mkdtemp(prefix="mpishare-") if comm.rank == 0 else None
        self._folder = Path(comm.bcast(folder, 0))
        store = distributed.FileStore(str(self._folder / "store"), comm.size)
        with refusals(self.label, RuntimeError):
            distributed.init_process_group(
                "gloo",
                store=store,
                rank=comm.rank,
                world_size=comm.size,
                timeout=timedelta(seconds=session.options.timeout_s),
            )
        self._tensors: dict[int, tuple[Any, Any]] = {}

    @classmethod
    def require(cls, session: Session) -> None:
        """Refuse to be made where PyTorch has no symmetric memory, or ranks another node. Local."""
        if session.node.size < session.comm.size:
            raise UnsupportedError("torch symmetric memory: the ranks are on several nodes")
        os.environ.update(_SETTINGS)
        if find_spec("torch") is None:
            raise UnsupportedError("torch symmetric memory: PyTorch is not installed")
        with refusals(cls.label, ImportError, OSError):
            import torch
            import torch.distributed._symmetric_memory
        if not torch.cuda.is_available():
            raise UnsupportedError("torch symmetric memory: this PyTorch sees no GPU")

    def empty(self, words: int) -> Any:
        """Return symmetric memory. Collective."""
        xp = self.session.node.xp
        with refusals(self.label, RuntimeError):
            tensor = self._symmetric.empty(words, dtype=self._torch.int64, device=self._device)
            handle = self._symmetric.rendezvous(tensor, self._distributed.group.WORLD)
        memory = xp.from_dlpack(tensor).view("u8")
        memory.fill(0)
        self._tensors[int(memory.data.ptr)] = tensor, handle
        return memory

    def free(self, memory: Any) -> None:
        """Give symmetric memory back. Collective."""
        self.session.synchronize()
        del self._tensors[int(memory.data.ptr)]

    def mover(self, links: Sequence[Link], *, early: bool) -> Callable[[], None]:  # noqa: ARG002
        """Return a copy, a signal and a wait a link. Stream-ordered."""
        # What `empty` wrote is there on all ranks before the first word of another one.
        self.session.synchronize()
        self.session.comm.Barrier()
        from_dlpack = self._torch.from_dlpack
        copies, signals = [], []
        for channel, each in enumerate(links):
            # The k-th place is the same on all ranks, so that mine tells where the neighbor's is.
            first, handle = self._place(each.into)
            here = handle.get_buffer(handle.rank, (each.words,), self._torch.int64, first)
            if here.data_ptr() != int(each.into.data.ptr):
                raise UnsupportedError(
                    f"{self.label}: a tensor does not begin where its memory does"
                )
            there = handle.get_buffer(each.to, (each.words,), self._torch.int64, first)
            copies.append((there, from_dlpack(each.out.view("i8"))))
            signals.append((handle, each.to, each.source, channel))

        def move() -> None:
            for (there, out), (handle, to, _, channel) in zip(copies, signals, strict=True):
                there.copy_(out, non_blocking=True)
                handle.put_signal(to, channel)
            for handle, _, source, channel in signals:
                handle.wait_signal(source, channel)

        return move

    def _place(self, into: Any) -> tuple[int, Any]:
        """Return where in its tensor a place begins, in words, and the tensor's handle."""
        address = int(into.data.ptr)
        for first, (tensor, handle) in self._tensors.items():
            if first <= address < first + 8 * tensor.numel():
                return (address - first) // 8, handle
        raise ValueError("words land in memory that is not symmetric")

    def close(self) -> None:
        """End the process group and take its file away. Collective."""
        self.session.synchronize()
        self._tensors.clear()
        self._distributed.destroy_process_group()
        self.session.comm.Barrier()
        if self.session.comm.rank == 0:
            (self._folder / "store").unlink(missing_ok=True)
            self._folder.rmdir()

"""PyTorch's symmetric memory: copies into a neighbor's tensor, and its signals on the stream."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mpishare.bench.library import Library, Transfer
from mpishare.bench.session import Call, Session

#: Read when it allocates. Copies do not use multicast, and its setup affects every GPU of the host,
#: including those of other users; each tensor has memory of its own, so that offsets in it count
#: from its beginning.
_SETTINGS = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_SYMMMEM": "CUDA",
    "TORCH_SYMMMEM_IMPLICIT_POOL": "0",
}


class TorchSymmetric(Library):
    """A process group over all ranks of the run, which are those of one node.

    The group meets through a file of rank 0 and uses gloo, which does not touch the GPU. Words
    alternate between two buffers, as with every library that writes into another rank's memory: the
    signal in between says that they were read.
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
        # From here on PyTorch works on the stream of the bench.
        torch.cuda.set_stream(torch.cuda.ExternalStream(session.stream.ptr, self._device))
        self._tensors: dict[int, tuple[Any, Any]] = {}
        self._folder: Path | None = None  # of the library that made the process group
        if distributed.is_initialized():
            return
        folder = tempfile.mkdtemp(prefix="mpishare-") if comm.rank == 0 else None
        self._folder = Path(comm.bcast(folder, 0))
        store = distributed.FileStore(str(self._folder / "store"), comm.size)
        with self.refusals(RuntimeError):
            distributed.init_process_group(
                "gloo",
                store=store,
                rank=comm.rank,
                world_size=comm.size,
                timeout=timedelta(seconds=session.options.timeout_s),
            )

    @classmethod
    def require(cls, session: Session) -> None:
        if session.node.size < session.comm.size:
            raise cls.refusal("the ranks are on several nodes")
        os.environ.update(_SETTINGS)
        if find_spec("torch") is None:
            raise cls.refusal("PyTorch is not installed")
        with cls.refusals(ImportError, OSError):
            import torch
            import torch.distributed._symmetric_memory
        if not torch.cuda.is_available():
            raise cls.refusal("this PyTorch sees no GPU")

    def empty(self, words: int) -> Any:
        xp = self.session.node.xp
        with self.refusals(RuntimeError):
            tensor = self._symmetric.empty(words, dtype=self._torch.int64, device=self._device)
            handle = self._symmetric.rendezvous(tensor, self._distributed.group.WORLD)
        memory = xp.from_dlpack(tensor).view("u8")
        memory.fill(0)
        self._tensors[int(memory.data.ptr)] = tensor, handle
        return memory

    def free(self, memory: Any) -> None:
        self.session.synchronize()
        del self._tensors[int(memory.data.ptr)]

    def bind(self, transfers: Sequence[Transfer], *, early: bool) -> Call:
        self.session.line_up()  # what `empty` wrote is there on all ranks before any rank copies
        from_dlpack = self._torch.from_dlpack
        copies, signals = [], []
        for channel, each in enumerate(transfers):
            # The k-th `into` has the same offset on all ranks.
            first, handle = self._offset(each.into)
            here = handle.get_buffer(handle.rank, (each.words,), self._torch.int64, first)
            if here.data_ptr() != int(each.into.data.ptr):
                raise self.refusal("a tensor does not begin where its memory does")
            there = handle.get_buffer(each.to, (each.words,), self._torch.int64, first)
            copies.append((there, from_dlpack(each.out.view("i8"))))
            signals.append((handle, each.to, each.source, channel))

        def move_between_barriers() -> None:
            handle.barrier()
            for there, out in copies:
                there.copy_(out, non_blocking=True)
            handle.barrier()

        def move() -> None:
            for (there, out), (handle, to, _, channel) in zip(copies, signals, strict=True):
                there.copy_(out, non_blocking=True)
                handle.put_signal(to, channel)
            for handle, _, source, channel in signals:
                handle.wait_signal(source, channel)

        return move if early else move_between_barriers

    def _offset(self, into: Any) -> tuple[int, Any]:
        """Return the offset of `into` in its tensor, in words, and the handle of the tensor."""
        address = int(into.data.ptr)
        for first, (tensor, handle) in self._tensors.items():
            if first <= address < first + 8 * tensor.numel():
                return (address - first) // 8, handle
        raise ValueError("the words land in memory that is not symmetric")

    def close(self) -> None:
        self.session.synchronize()
        self._tensors.clear()
        if self._folder is None:
            return
        self._distributed.destroy_process_group()
        self.session.comm.Barrier()
        if self.session.comm.rank == 0:
            (self._folder / "store").unlink(missing_ok=True)
            self._folder.rmdir()

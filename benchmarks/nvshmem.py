"""NVSHMEM: puts with signals and waits for these, on the stream and in kernels."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from mpishare.bench.library import Library, Transfer
from mpishare.bench.session import Call, Session
from mpishare.errors import UnsupportedError

#: Within which nvcc must end; it takes seconds.
_NVCC_S = 60.0


class Nvshmem(Library):
    """NVSHMEM over all ranks of the run, through nvshmem4py.

    Words alternate between two buffers: before a rank puts into one of them again it has waited for
    the signal in between, which the reader sent after reading.
    """

    label = "NVSHMEM"
    halves = 2
    shares_gpus = False

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        import nvshmem.core
        from cuda.core import Device

        self._core, self._bindings = nvshmem.core, nvshmem.bindings
        self._signals: list[Any] = []
        self._module: Any = None
        self._no_module: str | None = None  # why it cannot be made
        comm, device = session.comm, Device(session.node.xp.cuda.Device().id)
        device.set_current()
        types = nvshmem.core.nvshmem_types
        errors = types.NvshmemError, types.NvshmemInvalid, nvshmem.bindings.nvshmem.NVSHMEMError
        name = nvshmem.core.get_unique_id(empty=comm.rank != 0)
        comm.Bcast(name._data.view(np.int8), 0)
        with self.refusals(*errors):
            nvshmem.core.init(
                device=device,
                uid=name,
                rank=comm.rank,
                nranks=comm.size,
                initializer_method="uid",
            )

    @classmethod
    def require(cls, session: Session) -> None:  # noqa: ARG003
        # Before the library is loaded: puts do not use multicast, and its setup affects every GPU
        # of the host, including those of other users.
        os.environ["NVSHMEM_DISABLE_NVLS"] = "1"
        if find_spec("nvshmem") is None:
            raise cls.refusal("nvshmem4py is not installed")
        with cls.refusals(ImportError, OSError, RuntimeError):
            import nvshmem.core

            nvshmem.core.get_version()  # loads the library

    def empty(self, words: int) -> Any:
        memory = self._core.array((words,), dtype="uint64")
        memory.fill(0)
        return memory

    def free(self, memory: Any) -> None:
        self.session.synchronize()
        self._core.free_array(memory)

    def bind(self, transfers: Sequence[Transfer], *, early: bool) -> Call:
        stream = int(self.session.stream.ptr)
        # Without two buffers, or in a graph, which would repeat the number of a signal.
        if not early:
            return self._between_barriers(transfers, stream)
        put = self._bindings.putmem_signal_on_stream
        wait = self._bindings.signal_wait_until_on_stream
        put_value = int(self._core.SignalOp.SIGNAL_SET)
        reached = int(self._core.ComparisonType.CMP_GE)
        # Held: the calls have addresses only.
        signals = self.empty(len(transfers))
        self._signals.append(signals)
        self.session.line_up()  # what `empty` wrote is there on all ranks before any rank puts
        first = int(signals.data.ptr)
        # The k-th `into` and the k-th signal have the same address on all ranks.
        puts = [
            (int(each.into.data.ptr), int(each.out.data.ptr), 8 * each.words, first + 8 * k)
            for k, each in enumerate(transfers)
        ]
        to = [each.to for each in transfers]
        waits = [first + 8 * k for k in range(len(transfers))]
        step = 0

        def move() -> None:
            nonlocal step
            step += 1
            for arguments, peer in zip(puts, to, strict=True):
                put(*arguments, step, put_value, peer, stream)
            for signal in waits:
                wait(signal, reached, step, stream)

        return move

    def bind_sum(self, array: Any) -> Call:
        address, stream = int(array.data.ptr), int(self.session.stream.ptr)
        team = int(self._bindings.nvshmem.Team_id.TEAM_WORLD)
        arguments = team, address, address, int(array.size), stream
        return partial(self._bindings.double_sum_reduce_on_stream, *arguments)

    def _between_barriers(self, transfers: Sequence[Transfer], stream: int) -> Call:
        put = self._bindings.putmem_on_stream
        sync, barrier = self._bindings.sync_all_on_stream, self._bindings.barrier_all_on_stream
        puts = [
            (int(each.into.data.ptr), int(each.out.data.ptr), 8 * each.words, each.to, stream)
            for each in transfers
        ]

        def move() -> None:
            sync(stream)
            for each in puts:
                put(*each)
            barrier(stream)

        return move

    def kernel(self, name: str) -> Any:
        """Return a kernel of `nvshmem.cuh`. Collective: rank 0 compiles at the first call."""
        if self._module is None and self._no_module is None:
            comm, attempt = self.session.comm, self.session.attempt
            cubin, self._no_module = attempt(lambda: None if comm.rank else self._compiled())
            if self._no_module is None:
                cubin = comm.bcast(cubin)
                self._module, self._no_module = attempt(lambda: self._loaded(cubin))
        if self._no_module is not None:
            raise UnsupportedError(self._no_module)
        return self._module.get_function(name)

    def _compiled(self) -> bytes:
        """Return the kernels as machine code for this GPU, linked with NVSHMEM's own. Local."""
        cuda, file = self.session.node.xp.cuda, Path(__file__).with_suffix(".cuh")
        nvcc = cuda.get_nvcc_path()
        if nvcc is None:
            raise self.refusal("there is no nvcc to link its kernels")
        from cuda.pathfinder import load_nvidia_dynamic_lib

        # The same package as that of the host's library, which looks at the version.
        folder = Path(str(load_nvidia_dynamic_lib("nvshmem_host").abs_path)).parents[1]
        if not (folder / "lib" / "libnvshmem_device.a").exists():
            raise self.refusal(f"{folder} has no lib/libnvshmem_device.a")
        with tempfile.TemporaryDirectory(prefix="mpishare-") as work:
            made, cubin = Path(work, "kernels.o"), Path(work, "kernels.cubin")
            architecture = f"-arch=sm_{cuda.Device().compute_capability}"
            of_code = f"-I{folder / 'include'}", "-std=c++17", "-rdc=true", "-x", "cu", "-dc"
            of_link = f"-L{folder / 'lib'}", "-lnvshmem_device", "-dlink", "-cubin"
            for words in ((*of_code, file, "-o", made), (made, *of_link, "-o", cubin)):
                command = [*nvcc.split(), architecture, *map(str, words)]
                with self.refusals(OSError, subprocess.SubprocessError):
                    done = subprocess.run(
                        command, capture_output=True, text=True, timeout=_NVCC_S, check=False
                    )
                if done.returncode:
                    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
                    why = said[0] if said else f"exit status {done.returncode}"
                    raise self.refusal(f"nvcc: {why}")
            return cubin.read_bytes()

    def _loaded(self, cubin: bytes) -> Any:
        cuda = self.session.node.xp.cuda
        module = cuda.Module()
        # CUDA's, those of a library that is too old for it, and its own.
        errors = RuntimeError, AttributeError, self._bindings.nvshmem.NVSHMEMError
        with self.refusals(*errors):
            module.load(cubin)
            # NVSHMEM's state, which its functions for kernels read.
            self._bindings.cumodule_init(int(module.ptr))
        return module

    def close(self) -> None:
        for signals in self._signals:
            self.free(signals)
        self._core.finalize()

"""What all cases of a run share: the node, the stream, the options, and how ranks agree."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any, TypeVar

from mpi4py import MPI

from mpishare import CudaError, Node, PeerError, PeerTimeout, UnsupportedError
from mpishare.bench.cases import Case
from mpishare.bench.options import Options
from mpishare.bench.report import Row, size_text
from mpishare.errors import format_nbytes
from mpishare.memory.shared import available_nbytes
from mpishare.runtime.route import agree_on_forced

Made = TypeVar("Made")
Call = Callable[[], object]
#: What is timed, and what frees what that needs.
Bound = tuple[Call, Call]


class Budget:
    """The time of ``--seconds`` by rank 0's clock, shared alike by the cases and sizes to come."""

    def __init__(self, comm: MPI.Intracomm, seconds: float | None) -> None:
        self._comm, self._seconds, self._parts = comm, seconds, 1
        self._end = self._part_end = monotonic() + (seconds or 0.0)

    def expect(self, parts: int) -> None:
        self._parts = max(parts, 1)

    def begin(self) -> None:
        now = monotonic()
        self._part_end = now + (self._end - now) / self._parts
        self.skip()

    def skip(self) -> None:
        """Count a part that is left out. Local."""
        self._parts = max(self._parts - 1, 1)

    def require(self) -> None:
        """Raise `UnsupportedError` if there is no time for another part. Collective."""
        if self._seconds is not None and not self._comm.bcast(monotonic() < self._end):
            raise UnsupportedError(f"the {self._seconds:g} s of --seconds were over")

    def allows(self, more_s: float) -> bool:
        """Return whether the part has that much time left. Collective."""
        return self._seconds is None or self._comm.bcast(monotonic() + more_s <= self._part_end)


def do_nothing() -> None:
    """Stand in for a stream's synchronize where calls block anyway."""


def in_turn(*calls: Call) -> Call:
    """Return the call that makes these, one after the other."""

    def run() -> None:
        for call in calls:
            call()

    return calls[0] if len(calls) == 1 else run


class Session:
    """One run of the benchmark. Collective over `comm`, host-blocking: makes the node."""

    def __init__(self, comm: MPI.Intracomm, options: Options) -> None:
        #: All ranks of the run; the maximum over the ranks is taken here.
        self.comm, self.options = comm, options
        self.budget = Budget(comm, options.limit_s)
        self.node = Node(comm, timeout_s=options.timeout_s)
        agree_on_forced(comm, "the benchmark", options.timeout_s, on_gpu=self.on_cuda)
        #: All variants work on this one stream; None on the host backend.
        self.stream: Any = None
        #: Waits for the stream; does nothing on the host backend, whose calls block.
        self.synchronize: Callable[[], None] = do_nothing
        if self.on_cuda:
            # Not the null stream, which synchronizes with all others.
            self.stream = self.node.xp.cuda.Stream(non_blocking=True)
            self.stream.use()
            self.synchronize = self.stream.synchronize
        device = self.node.device
        gpus = Counter(comm.allgather(None if device is None else device.uuid))
        del gpus[None]
        #: The largest number of ranks that share a GPU; 0 on the host backend.
        self.ranks_per_gpu = max(gpus.values(), default=0)
        #: The libraries that were opened, or None and the reason.
        self.libraries: dict[type, tuple[Any, str | None]] = {}
        #: The rows that are finished, and for each case the sizes that were left out.
        self.rows: list[Row] = []
        self.left_out: defaultdict[str, list[str]] = defaultdict(list)

    @property
    def on_cuda(self) -> bool:
        """Whether the node shares memory of GPUs."""
        return self.node.backend == "cuda"

    def line_up(self) -> None:
        """Wait for the stream and then for all ranks. Collective."""
        # CuPy 14.2 forgets a stream set by use() when it copies a strided array to the host.
        if self.on_cuda and self.node.xp.cuda.get_current_stream() != self.stream:
            raise RuntimeError("the current stream is no longer that of the bench")
        self.synchronize()
        self.comm.Barrier()

    def synchronized(self, call: Call) -> Call:
        """Return `call` after a wait for the stream: what MPI needs, which has no streams."""
        return in_turn(self.synchronize, call) if self.on_cuda else call

    def require_memory(self, nbytes: int) -> None:
        """Raise `MemoryError` if the GPU, or a node without, lacks memory for `nbytes` per rank."""
        # A host overcommits memory and then kills the process that touches it.
        if self.on_cuda:
            available: int = self.node.xp.cuda.runtime.memGetInfo()[0]
            where, needed = "GPU", nbytes * self.ranks_per_gpu
        else:
            where, needed, available = "node", nbytes * self.node.size, available_nbytes()
        if needed > available:
            raise MemoryError(
                f"{format_nbytes(needed)} of memory are needed on a {where} and "
                f"{format_nbytes(available)} available"
            )

    def expect(self, cases: Sequence[Case]) -> None:
        """Divide the time among the sizes of these cases."""
        sizes, backend = self.options.sizes, self.node.backend
        counts = [len(sizes(backend, case.name)) if case.is_sized else 1 for case in cases]
        self.budget.expect(sum(counts))

    def sizes(self, case: Case, copies: float) -> Iterator[int]:
        """Yield the sizes of a case that have memory for so many copies, and time. Collective."""
        return self.blocks(case, lambda nbytes: (nbytes, nbytes, int(copies * nbytes)))

    def blocks(self, case: Case, of_size: Callable[[int], tuple[Made, int, int]]) -> Iterator[Made]:
        """Yield what the sizes of a case come to, each once, where it fits. Collective.

        `of_size` returns that, how many bytes its own size has, and how many a rank needs.
        """
        done = set()
        for nbytes in self.options.sizes(self.node.backend, case.name):
            block, own_nbytes, needed_nbytes = of_size(nbytes)
            if block in done:
                self.budget.skip()
            elif self.fits(case, own_nbytes, needed_nbytes):
                yield block
            done.add(block)

    def fits(self, case: Case, nbytes: int, needed_nbytes: int) -> bool:
        """Return whether a size has memory for each rank, and time; else note it. Collective."""
        if self.on_cuda:
            # What ranks keep of the sizes before is not free for others.
            self.node.xp.get_default_memory_pool().free_all_blocks()
            self.line_up()

        def require() -> None:
            self.budget.require()
            self.require_memory(needed_nbytes)

        _, reason = self.attempt(require)
        if reason is not None:
            self.left_out[case.name].append(f"{size_text(nbytes)} left out: {reason}")
            self.budget.skip()
        return reason is None

    def attempt(self, make: Callable[[], Made]) -> tuple[Made | None, str | None]:
        """Return what `make` makes, or why some rank could not make it.

        Collective, host-blocking. The reason is the message of the first rank that failed by
        itself; the node then closes what the others made. A missing peer ends the run.
        """
        made, message, is_peer = None, None, False
        try:
            made = make()
        except PeerTimeout:
            raise
        except (UnsupportedError, CudaError, MemoryError, PeerError) as exc:
            message, is_peer = str(exc) or type(exc).__name__, isinstance(exc, PeerError)
        found = self.comm.allgather((is_peer, self.comm.rank, message))
        failures = sorted(each for each in found if each[2])
        return (None, failures[0][2]) if failures else (made, None)

    def close(self) -> None:
        """Close the libraries, the last first. Collective."""
        while self.libraries:
            _, (library, _) = self.libraries.popitem()
            if library is not None:
                library.close()

"""A captured function on CUDA: a graph for each combination of its arguments."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy
import numpy as np

from mpishare.backends import cuda_graphs, driver
from mpishare.backends.cuda_streams import on_stream
from mpishare.backends.driver import launch_graph
from mpishare.coordination.recording import NoLoopError, Recording, require_none
from mpishare.errors import ClosedError, MpiShareError, UnsupportedError, describe
from mpishare.graphs.runs import Runs
from mpishare.plans.gpu.fields import current_stream
from mpishare.plans.gpu.replay import bind_last_stream
from mpishare.plans.layout import array_of, is_tensor
from mpishare.runtime.stream_chain import StreamChain

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from mpishare.backends import StreamInfo
    from mpishare.backends.driver import CudaGraph
    from mpishare.coordination.recording import Replayable
    from mpishare.graphs.runs import Work
    from mpishare.runtime.context import NodeContext

log = logging.getLogger("mpishare")

_MAX_GRAPHS = 64
_MAX_SEEN = 1024
_Array = cupy.ndarray
# The properties of a CuPy array that a graph depends on. Not the dtype itself, whose hash takes as
# long as all of the others.
identity = attrgetter("data.ptr", "shape", "strides", "dtype.char")


class Captured(NamedTuple):
    """A graph of a function, and the data of a launch."""

    graph: CudaGraph
    calls: list[tuple[Replayable, int]]  # engines, with the number of their calls
    chains: list[StreamChain]  # of the step and of its plans: a launch comes after their calls
    result: Any  # of the function
    done: Any = None  # array of one element, for one run of a loop on the host


class CudaRuns(Runs):
    """Runs a function by one graph for each combination of arguments, or by loops of them."""

    _scalars = ()
    _memory_of_answers = " in GPU memory"

    def __init__(self, context: NodeContext, name: str, work: Work) -> None:
        super().__init__(context, name, work)
        backend: Any = context.backend
        self._backend, self._device = backend, backend.device.ordinal
        self._where = f"{name}, rank {context.rank} of {context.size}"
        with cupy.cuda.Device(self._device):
            # A new one: a default stream cannot be captured.
            self._stream = cupy.cuda.Stream(non_blocking=True)
            if work.until is not None:
                # On this stream: a busy current one would zero it after the first calls.
                with on_stream(self._stream):
                    self.iterations = cupy.zeros(1, np.int64)
                self._stream.synchronize()
        # Every replay uses the allocations of the captured function. Held here, since a pool that
        # runs out of memory frees its unused blocks.
        self._memory: list[Any] = []
        self._pool: Any = cupy.cuda.MemoryPool(self._allocate)
        self._torch_pool: Any = None
        # The graphs share that memory, so that no two of them may run at once.
        self._chain = StreamChain(backend, name)
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, Captured] = {}
        self._has_loops = work.until is not None
        if self._has_loops and (why := cuda_graphs.why_no_loops()):
            self._loop_on_host(why)

    def bind(self) -> Callable[[Sequence[Any]], Any]:
        return self._bind_replay() if self._until is None else self.run

    def _bind_replay(self) -> Callable[[Sequence[Any]], Any]:
        """Return a function that replays the graph of a call, or calls `run` if it cannot.

        Fast for known CuPy arrays on the stream of the last call.
        """
        run, where = self.run, self._chain.name
        last_stream = bind_last_stream(self._chain, self._context.agreement)

        def replay(arguments: Sequence[Any]) -> Any:
            try:
                captured = self._graphs.get(tuple(map(identity, arguments)))
            except AttributeError:  # not CuPy's
                return run(arguments)
            if captured is None or (handle := last_stream()) is None:
                return run(arguments)
            for each in captured.chains:
                if each.lasting != handle:
                    return run(arguments)
            for engine, _ in captured.calls:
                if not engine.calls or engine.agreement.life.failure is not None:
                    return run(arguments)
            launch_graph(captured.graph.handle, handle, where)
            for engine, count in captured.calls:
                engine.calls[0] += count
            return captured.result

        return replay

    def run(self, arguments: Sequence[Any]) -> Any:
        self._context.agreement.check()
        key = key_of(arguments, self._name)
        try:
            given = current_stream(_arrays(arguments), self._device)
        except ValueError as error:
            raise ValueError(f"{self._name} failed: {error}") from None
        stream: StreamInfo = self._backend.enter(given)
        if stream[3]:  # it is being captured
            return self._run_inside(arguments)
        require_none(self._name, "its stream is not the captured one")
        captured = self._graphs.get(key)
        if captured is not None:
            self._repeat(captured, stream, made=0)
            return captured.result
        if self._until is not None:
            return self._begin_loop(key, arguments, stream)
        if key not in self._seen:
            # The first time: CuPy compiles and CUDA loads kernels at their first use.
            result = self._call(arguments)
            if len(self._seen) >= _MAX_SEEN:
                self._seen.clear()
            self._seen.add(key)
            return result
        captured = self._capture(key, arguments)
        self._replay(captured, stream, made=0)
        return captured.result

    def close(self) -> None:
        if (self._memory or self._torch_pool) and self._context.life.failure is None:
            # The driver waits too before it frees memory, without a deadline.
            self._context.wait_until(self.is_over, f"{self._name}: close")
        for captured in self._graphs.values():
            captured.graph.close()
        self._graphs.clear()
        self._chain.end()
        self._memory, self._pool, self._torch_pool = [], None, None

    def is_over(self) -> bool:
        return self._chain.is_over()

    def _run_inside(self, arguments: Sequence[Any]) -> Any:
        """Run the function as a part of an outer capture."""
        if self._until is not None:
            raise UnsupportedError(
                f"{self._name} failed: its loop is a graph, which cannot be launched inside "
                "another capture. Call it outside of that."
            )
        return self._function(*arguments)

    def _begin_loop(self, key: Hashable, arguments: Sequence[Any], stream: StreamInfo) -> Any:
        """Run the function once, which loads its kernels, and continue by a graph."""
        handle, owner, stays_alive, _ = stream
        self._chain.follow(handle, owner, stays_alive=stays_alive)  # a loop may still count
        result = self._call(arguments)
        done = self._ask(arguments)
        self._count_from(1, handle)
        self._context.synchronize(handle, self._name)
        if self._at_most > 1 and not done.any():
            captured = self._capture(key, arguments)
            self._repeat(captured, stream, made=1)
            result = captured.result
        return result

    def _as_array(self, answer: Any) -> Any:
        return cupy.asarray(answer) if hasattr(answer, "__cuda_array_interface__") else None

    def _loop_on_host(self, why: str) -> None:
        self._has_loops = False
        log.warning("%s: until= is looked at by the host after every run, as %s", self._name, why)

    def _capture(self, key: Hashable, arguments: Sequence[Any]) -> Captured:
        """Make and keep the graph of the function on these arguments."""
        try:
            captured = self._capture_once(arguments, is_loop=self._has_loops)
        except NoLoopError as error:
            self._loop_on_host(str(error))
            captured = self._capture_once(arguments, is_loop=False)
        if len(self._graphs) >= _MAX_GRAPHS:
            self._graphs.pop(next(iter(self._graphs))).graph.close()
        self._graphs[key] = captured
        return captured

    def _capture_once(self, arguments: Sequence[Any], *, is_loop: bool) -> Captured:
        """Return the graph of the function, or of its loop."""
        done = None
        with self._working(), Recording(self._name, is_loop=is_loop) as recording:
            capture = cuda_graphs.Capture(self._stream.ptr, self._where, is_loop=is_loop)
            try:
                result = self._call(arguments)
                if self._until is not None:
                    done = self._ask(arguments)
                if is_loop:
                    # A break of the node raises the abort words of all engines.
                    abort = next((engine.abort for engine in recording.engines), 0)
                    capture.decide(done, self.iterations, self._at_most, abort)
            except BaseException as error:
                capture.abandon()
                recording.fail()
                self._refuse(error)
                raise
            try:
                graph = capture.end(recording.events)
            except BaseException as error:
                recording.fail()
                self._refuse(error)
                raise
        calls = recording.take_calls()
        for engine, _ in calls:
            if engine.nccl is not None:
                engine.nccl.graphs.add(graph)  # it ends with the communicator
        chains = [self._chain, *(chain for engine, _ in calls for chain in engine.chains)]
        return Captured(graph, calls, chains, result, None if is_loop else done)

    def _repeat(self, captured: Captured, stream: StreamInfo, *, made: int) -> None:
        """Launch a graph; again and again if it is one run of a loop on the host."""
        if captured.done is None:
            self._replay(captured, stream, made=made)
            return
        handle = stream[0]
        is_over = False
        while not is_over and made < self._at_most:
            self._replay(captured, stream, made=0)
            made += 1
            self._context.synchronize(handle, self._name)
            is_over = bool(captured.done.any())
        self._count_from(made, handle)

    def _replay(self, captured: Captured, stream: StreamInfo, *, made: int) -> None:
        """Launch a graph, as if its calls were made now; `made` runs of the loop came before."""
        handle, owner, stays_alive, _ = stream
        for engine, _ in captured.calls:
            if not engine.calls:
                raise ClosedError(f"{self._name} failed: its graph uses {engine.name}, now closed")
            engine.agreement.check()
        for chain in captured.chains:
            chain.follow(handle, owner, stays_alive=stays_alive)
        if self.iterations is not None and not made:
            self._count_from(0, handle)
        launch_graph(captured.graph.handle, handle, self._where)
        if not made:  # later runs of a loop belong to the first
            for engine, count in captured.calls:
                engine.calls[0] += count
        if not stays_alive:
            for chain in captured.chains:
                chain.leave()

    def _count_from(self, made: int, stream: int) -> None:
        to = self.iterations.data.ptr
        driver.call("cuMemsetD32Async", to, made, 1, stream, where=self._where)

    def _allocate(self, nbytes: int) -> Any:
        memory = cupy.cuda.Memory(nbytes)
        self._memory.append(memory)
        return cupy.cuda.MemoryPointer(memory, 0)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Make the step's stream and its memory pool current."""
        with contextlib.ExitStack() as stack:
            if gc.isenabled():
                # A collection may make CUDA calls that no capture allows, or end the process.
                gc.disable()
                stack.callback(gc.enable)
            stack.enter_context(cupy.cuda.Device(self._device))
            stack.enter_context(on_stream(self._stream))
            stack.enter_context(cupy.cuda.using_allocator(self._pool.malloc))
            torch = sys.modules.get("torch")
            if torch is not None and torch.cuda.is_initialized():
                self._use_torch(torch, stack)
            yield

    def _use_torch(self, torch: Any, stack: contextlib.ExitStack) -> None:
        if not hasattr(torch.cuda, "use_mem_pool"):
            raise UnsupportedError(
                f"{self._name} failed: PyTorch {torch.__version__} has no memory pools, in which a "
                "graph keeps what the function allocates. Update it to 2.6 or newer."
            )
        stream = torch.cuda.ExternalStream(self._stream.ptr, device=self._device)
        self._torch_pool = self._torch_pool or torch.cuda.MemPool()
        stack.enter_context(torch.cuda.stream(stream))
        stack.enter_context(torch.cuda.use_mem_pool(self._torch_pool, device=self._device))

    def _refuse(self, error: BaseException) -> None:
        """Raise `UnsupportedError` for an error that the capture has caused; else return."""
        is_ours = isinstance(error, MpiShareError)
        comes_of_it = cuda_graphs.is_capture_error(error)
        # CuPy and PyTorch raise plain errors for calls that they refuse in a capture.
        if comes_of_it or (isinstance(error, RuntimeError) and not is_ours):
            raise UnsupportedError(
                f"{self._name} failed: the function cannot be captured into a graph: "
                f"{describe(error)}. It may not wait for the GPU, as float(x[0]), print(x), "
                "x.get() and synchronize() do, and every stream that it forks must be joined. Do "
                "that outside of it, or call the function itself."
            ) from error


# --- the key of a graph among those of a function: its arguments


def key_of(arguments: Sequence[Any], name: str) -> Hashable:
    """Return the key of a graph; `TypeError` if an argument is neither on the GPU nor hashable."""
    return tuple(
        [identity(each) if type(each) is _Array else _key(each, name) for each in arguments]
    )


def _key(value: Any, name: str) -> Hashable:
    value = array_of(value)
    if isinstance(value, _Array):
        return identity(value)
    if isinstance(value, (tuple, list)):
        return type(value), key_of(value, name)
    if is_tensor(value):
        if not value.is_cuda:
            raise TypeError(f"{name} failed: a tensor on {value.device} is not in GPU memory")
        return value.data_ptr(), tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, np.ndarray):
        raise TypeError(
            f"{name} failed: an argument is a NumPy array, whose values a replay would not read "
            "again. Pass a CuPy array, or numbers."
        )
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is not None:
        strides = interface.get("strides")
        return interface["data"][0], interface["shape"], strides, interface["typestr"]
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(
            f"{name} failed: an argument is neither an array in GPU memory nor hashable: {error}"
        ) from None
    return type(value), value  # True and 1.0 are equal to 1


def _arrays(arguments: Sequence[Any]) -> list[Any]:
    found = []
    for each in arguments:
        if isinstance(each, (tuple, list)):
            found += _arrays(each)
        elif is_tensor(array := array_of(each)) or hasattr(array, "__cuda_array_interface__"):
            found.append(array)
    return found

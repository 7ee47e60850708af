"""CUDA graphs of captured streams: instantiated, launched; and loops of them.

Imported only where a GPU was found.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import cupy
from cuda import bindings as package
from cuda.bindings import driver as bindings

from mpishare.backends import driver, graph_nodes, kernels
from mpishare.backends.driver import CudaGraph
from mpishare.coordination.recording import NoLoopError
from mpishare.errors import CudaError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from mpishare.backends.driver import Enqueued

# Each node keeps the priority of its stream: by default kernels that wait for other ranks would
# queue behind those that they should run beside.
_KEEP_PRIORITIES = 8
_SET_AT_LAUNCH = 1  # CU_GRAPH_COND_ASSIGN_DEFAULT
_LOOPS_SINCE = 12, 4
_CAPTURE_ERRORS = range(900, 909)
_REFUSED = 1, 801  # invalid value, not supported


def is_capture_error(error: BaseException) -> bool:
    """Whether a call failed because a stream is being captured, or was."""
    code = error.code if isinstance(error, CudaError) else getattr(error, "status", 0)
    return code in _CAPTURE_ERRORS


def why_no_loops() -> str | None:
    """Return why graphs have no loops on this machine; None where they have."""
    number = int(driver.call("cuDriverGetVersion"))
    version = number // 1000, number % 1000 // 10
    if version < _LOOPS_SINCE:
        return f"the driver is of CUDA {version[0]}.{version[1]}, older than 12.4"
    if not hasattr(bindings, "cuGraphConditionalHandleCreate"):
        return "cuda-bindings is older than CUDA 12.4"
    # CuPy's builds for CUDA 12 take any NVRTC of it: an older one cannot compile decide.cu.
    version = cupy.cuda.nvrtc.getVersion()
    if version < _LOOPS_SINCE:
        return f"CuPy compiles by NVRTC {version[0]}.{version[1]}, older than 12.4"
    return None


class Replay(CudaGraph):
    """A launch with its present arguments as a graph, in a third of the time.

    `needs_host`: whether each replay runs a function of the host, which takes longer.
    """

    def __init__(self, launch: Enqueued, stream: int, where: str) -> None:
        graph = captured(launch, stream, where)
        events = graph_nodes.events_of(int(graph))  # of NCCL
        self.needs_host = not graph_nodes.remove_events(int(graph), events)
        super().__init__(graph, 0, where)
        driver.call("cuGraphDestroy", graph, where=where)

    def enqueue(self, stream: int) -> None:
        driver.launch_graph(self.handle, stream, self._where)


def captured(launch: Enqueued, stream: int, where: str) -> Any:
    """Return the graph of a launch."""
    driver.call("cuStreamBeginCapture", stream, driver.CAPTURE_THIS_THREAD, where=where)
    try:
        launch.enqueue(stream)
    finally:
        graph = driver.call("cuStreamEndCapture", stream, where=where)
    return graph


class Capture:
    """A capture of a non-default stream until `end` or `abandon`; a loop until `decide` ends it."""

    def __init__(self, stream: int, where: str, *, is_loop: bool) -> None:
        self._stream = stream
        self._where = where
        self._outer: Any = None
        self._handle = 0
        if not is_loop:
            self._call("cuStreamBeginCapture", stream, driver.CAPTURE_RELAXED)
            return
        self._outer = self._call("cuGraphCreate", 0)
        try:
            body = self._add_loop(self._outer)
            self._call(
                "cuStreamBeginCaptureToGraph", stream, body, None, None, 0, driver.CAPTURE_RELAXED
            )
        except BaseException:
            self._call("cuGraphDestroy", self._outer)
            raise

    def _call(self, name: str, *arguments: Any) -> Any:
        return driver.call(name, *arguments, where=self._where)

    def _add_loop(self, graph: Any) -> Any:
        """Add a loop to a graph; return the graph of its body."""
        context = self._call("cuCtxGetCurrent")
        handle = self._call("cuGraphConditionalHandleCreate", graph, context, 1, _SET_AT_LAUNCH)
        self._handle = int(handle)
        node = bindings.CUgraphNodeParams()
        node.type = bindings.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        node.conditional.handle = handle
        node.conditional.type = bindings.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        node.conditional.size = 1
        node.conditional.ctx = context
        # The data of edges came with CUDA 13.
        is_of_13 = int(package.__version__.partition(".")[0]) >= 13
        none: tuple[Any, ...] = (None, None, 0) if is_of_13 else (None, 0)
        self._call("cuGraphAddNode", graph, *none, node)
        return node.conditional.phGraph_out[0]

    def decide(self, done: Any, iterations: Any, at_most: int, abort: int) -> None:
        """Capture the end of a loop's body: another iteration, unless `done` is not 0.

        `done` is one boolean or integer element. `iterations`, one int64, is counted up, and
        `at_most` ends the loop too, as does the word at device address `abort` (0 for none) when it
        is not 0.
        """
        flag = done.data.ptr, done.dtype.itemsize
        arguments = self._handle, *flag, iterations.data.ptr, at_most, abort
        function = kernels.kernel(Path(__file__).with_name("decide.cu").read_text(), "decide")
        driver.Launch(function, 1, 1, arguments, self._where).enqueue(self._stream)

    def end(self, events: Callable[[], Collection[int]]) -> CudaGraph:
        """End the capture; return the graph, ready for launches, without these events of NCCL."""
        try:
            captured = self._call("cuStreamEndCapture", self._stream)
        except BaseException:
            if self._outer is not None:
                self._call("cuGraphDestroy", self._outer)
            raise
        graph = captured if self._outer is None else self._outer
        try:
            is_free = graph_nodes.remove_events(int(captured), events())
            if self._outer is not None and not is_free:
                raise NoLoopError("a function of the host is in it, as in messages over a network")
            return CudaGraph(graph, _KEEP_PRIORITIES, self._where)
        except CudaError as error:
            if self._outer is not None and error.code in _REFUSED:
                # E.g. memory that the driver allocates in the graph, as cuSPARSE's workspace.
                raise NoLoopError(f"the driver refuses what it repeats ({error})") from error
            raise
        finally:
            self._call("cuGraphDestroy", graph)

    def abandon(self) -> None:
        """End the capture and drop it: the stream can be used again."""
        _, graph = bindings.cuStreamEndCapture(self._stream)  # fails where the capture has
        graph = self._outer if self._outer is not None else graph
        if graph is not None and int(graph):
            self._call("cuGraphDestroy", graph)

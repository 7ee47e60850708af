"""What was captured, and the fast path that replays it."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy

from mpishare.backends.driver import launch_graph
from mpishare.coordination.recording import current
from mpishare.graphs.cuda_arguments import identity

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from mpishare.backends.cuda_graphs import CudaGraph
    from mpishare.coordination.agreement import Agreement
    from mpishare.coordination.recording import Replayable
    from mpishare.ordering.stream_chain import StreamChain

_Array = cupy.ndarray


class Captured(NamedTuple):
    """A graph of a function, and what a launch of it needs.

    Attributes
    ----------
    calls : list of (Replayable, int)
        The engines that it calls, and how often each.
    chains : list of StreamChain
        What a launch follows: the calls on the same step, and on its plans.
    result : object
        What the function returned.
    done : array or None
        Of one run of a loop that the host repeats: whether it is over.
    """

    graph: CudaGraph
    calls: list[tuple[Replayable, int]]
    chains: list[StreamChain]
    result: Any
    done: Any = None


def bind_replay(
    graphs: Mapping[Hashable, Captured],
    chain: StreamChain,
    agreement: Agreement,
    run: Callable[[Sequence[Any]], Any],
) -> Callable[[Sequence[Any]], Any]:
    """Return the function that replays the graph of a call, or runs where there is more to do.

    Fast are CuPy arrays that were seen before, on the stream of the last call.

    A closure, as `mpishare.halo.cuda.fast_path`: what it would look up takes as long as the launch.

    Parameters
    ----------
    graphs : mapping
        The graphs by their arguments.
    chain : StreamChain
        The step's; another stream than that of the last call takes the long way.
    agreement : Agreement
        The node's.
    run : callable
        The long way.
    """
    is_current, where = chain.is_current, chain.name

    def replay(arguments: Sequence[Any]) -> Any:
        for each in arguments:
            if type(each) is not _Array:
                return run(arguments)
        captured = graphs.get(tuple(map(identity, arguments)))
        handle = chain.handle
        if captured is None or handle is None or current() is not None:
            return run(arguments)
        for each in captured.chains:
            if each.handle != handle or not each.stays_alive:
                return run(arguments)
        if not is_current(handle):
            return run(arguments)
        if agreement.failure is not None or agreement.thread != get_ident():
            return run(arguments)
        for engine, _ in captured.calls:
            if engine.is_closed or engine.agreement.failure is not None:
                return run(arguments)
        launch_graph(captured.graph.handle, handle, where)
        for engine, count in captured.calls:
            engine.calls[0] += count
        return captured.result

    return replay

"""The graph of a captured function, and the fast path that replays it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from mpishare.backends.driver import launch_graph
from mpishare.graphs.cuda_arguments import identity
from mpishare.plans.gpu.replay import bind_last_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from mpishare.backends.driver import CudaGraph
    from mpishare.coordination.agreement import Agreement
    from mpishare.coordination.recording import Replayable
    from mpishare.windows.stream_chain import StreamChain


class Captured(NamedTuple):
    """A graph of a function, and the data of a launch."""

    graph: CudaGraph
    calls: list[tuple[Replayable, int]]  # engines, with the number of their calls
    chains: list[StreamChain]  # of the step and of its plans: a launch comes after their calls
    result: Any  # of the function
    done: Any = None  # array of one element, for one run of a loop on the host


def bind_replay(
    graphs: Mapping[Hashable, Captured],
    chain: StreamChain,
    agreement: Agreement,
    device: int,
    run: Callable[[Sequence[Any]], Any],
) -> Callable[[Sequence[Any]], Any]:
    """Return the function that replays the graph of a call, or calls `run` if it cannot.

    Fast for known CuPy arrays on the stream of the last call.
    """
    last_stream, where = bind_last_stream(chain, agreement, device), chain.name

    def replay(arguments: Sequence[Any]) -> Any:
        try:
            captured = graphs.get(tuple(map(identity, arguments)))
        except AttributeError:  # not CuPy's
            return run(arguments)
        if captured is None or (handle := last_stream()) is None:
            return run(arguments)
        for each in captured.chains:
            if each.lasting != handle:
                return run(arguments)
        for engine, _ in captured.calls:
            if engine.is_closed or engine.agreement.failure is not None:
                return run(arguments)
        launch_graph(captured.graph.handle, handle, where)
        for engine, count in captured.calls:
            engine.calls[0] += count
        return captured.result

    return replay

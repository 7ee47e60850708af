"""For tests that capture calls into a graph."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import mpishare


def skip_without_graphs(plan: Any) -> None:
    """Skip where a neighbor is served by the host, which no graph can capture."""
    if served := plan._setup.host_routes:
        pytest.skip(f"neighbors by {served}")


def skip_where_ranks_take_turns(node: mpishare.Node) -> None:
    """Skip where ranks share a GPU without MPS: no kernel waits for another rank there."""
    if node.report().time_sliced_gpus:
        pytest.skip("ranks share a GPU without MPS")


@contextlib.contextmanager
def captured(stream: Any, graphs: list[Any] | None = None) -> Iterator[None]:
    """What runs inside goes into a graph, which is added to the list, or else thrown away."""
    stream.begin_capture()
    try:
        yield
    finally:
        graph = stream.end_capture()
    if graphs is not None:
        graphs.append(graph)


def skip_unless_fused(node: mpishare.Node, plan: Any) -> None:
    """Skip on all ranks unless one kernel moves all cells between them."""
    mine = {route for peer, route in plan.routes.items() if peer != node.rank}
    used = {route for routes in node.comm.allgather(mine) for route in routes}
    if used - {"fused"}:
        pytest.skip("not by one kernel")


def engines_of(plan: Any) -> list[Any]:
    """What moves its cells: to the ghosts first, and back once it has been asked for."""
    return list(plan._engines)


def buffers_of(plan: Any) -> Any:
    """The staging of what goes to the ghosts."""
    return engines_of(plan)[0]._buffers


def refuse_full_checks(plan: Any) -> None:
    """From here on the calls of a plan must be replays."""

    def refuse(*_: Any) -> None:
        raise AssertionError("not replayed")

    for engine in engines_of(plan):
        engine._enter_call = refuse

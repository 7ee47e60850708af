"""For tests that capture calls into a graph."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import mpishare


def skip_without_graphs(halo: mpishare.HaloExchange) -> None:
    """Skip where a neighbor is served by the host, which no graph can capture."""
    if {"pinned", "mpi"} & set(halo.routes.values()):
        pytest.skip(f"neighbors by {set(halo.routes.values())}")


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

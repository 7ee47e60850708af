"""A pytest plugin: nodes that many tests share, and what a test leaves open is closed after it.

A test that raises leaves its nodes by that exception, so that ranks which wait for this one raise
`PeerError` at once instead of waiting for the limit. The next test gets a fresh node.
"""

import os
from collections.abc import Generator

import pytest
from mpi4py import MPI

from mpishare import Node
from mpishare.plans.node_cache import context_of
from tests.helpers.compiled import WHY_NONE

_kept: dict[str, Node] = {}


def _all(mine: bool) -> bool:
    """Whether that is so on every rank; does not spin, as the ranks may be more than the cores."""
    everyone = bytearray(MPI.COMM_WORLD.size)
    request = MPI.COMM_WORLD.Iallgather(bytes([mine]), everyone)
    while not request.Test():
        os.sched_yield()
    return all(everyone)


def _lend(backend: str) -> Node:
    node = _kept.get(backend)
    is_whole = node is not None and not node.is_closed and context_of(node).life.failure is None
    if not _all(is_whole):
        node = _kept[backend] = Node(backend=backend, timeout_s=40)
    return node


def _take_back(node: Node) -> None:
    if node.is_closed or context_of(node).life.failure is not None:
        return
    try:
        node.synchronize()
        for child in context_of(node).children:
            child.close()
    except BaseException as error:
        node.__exit__(type(error), error, error.__traceback__)
        raise


@pytest.fixture
def node() -> Generator[Node]:
    """A node over all ranks, on the backend that it picks itself."""
    lent = _lend("auto")
    yield lent
    _take_back(lent)


@pytest.fixture
def host_node() -> Generator[Node]:
    """A node over all ranks on the host backend, on a GPU machine too."""
    lent = _lend("host")
    yield lent
    _take_back(lent)


@pytest.fixture
def python_node(monkeypatch: pytest.MonkeyPatch) -> Generator[Node]:
    """A node on the host backend that is the test's own and has no compiled part."""
    monkeypatch.setenv("MPISHARE_HOST_CODE", "python")
    with Node(backend="host", timeout_s=40) as own:
        yield own


@pytest.fixture
def compiled_node(monkeypatch: pytest.MonkeyPatch) -> Generator[Node]:
    """The same of one that has it; skips where it was not built."""
    if WHY_NONE:
        pytest.skip(f"no compiled part: {WHY_NONE}")
    monkeypatch.setenv("MPISHARE_HOST_CODE", "compiled")
    with Node(backend="host", timeout_s=40) as own:
        yield own


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    try:
        return (yield)
    except pytest.skip.Exception:
        raise
    except BaseException as error:
        for name in ("node", "host_node", "python_node", "compiled_node", "mixed_node"):
            lent = getattr(item, "funcargs", {}).get(name)
            if lent is not None:
                lent.__exit__(type(error), error, error.__traceback__)
        raise


def pytest_sessionfinish() -> None:
    for node in _kept.values():
        if not node.is_closed:
            node.close()
    _kept.clear()

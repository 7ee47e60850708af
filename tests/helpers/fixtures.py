"""Fixtures of tests in lockstep: routes, streams, viewers. A plugin that pytest imports first."""

from collections.abc import Generator
from typing import Any

import pytest

from tests.helpers.viewer import SharedViewer, Viewer

ON_GPUS = [pytest.param(name, marks=pytest.mark.gpu) for name in ("copy", "pinned")]


def _name(route: str) -> str:
    return route or "own"


def _force(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param:
        monkeypatch.setenv("MPISHARE_ROUTE", request.param)
    return request.param


@pytest.fixture(params=["", "mpi"], ids=_name)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The routes that a plan chooses, and those of a plan over nodes."""
    return _force(request, monkeypatch)


@pytest.fixture(params=["", *ON_GPUS, "mpi"], ids=_name)
def every_route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the plan chooses, and every other way there is on any machine."""
    return _force(request, monkeypatch)


@pytest.fixture(params=["", *ON_GPUS], ids=_name)
def stream_route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same without messages, for which the host waits."""
    return _force(request, monkeypatch)


@pytest.fixture(params=ON_GPUS)
def forced_route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Those that no plan chooses where a kernel may do it all."""
    return _force(request, monkeypatch)


@pytest.fixture(autouse=True)
def on_cuda(request: pytest.FixtureRequest) -> None:
    """Tests of GPUs prove nothing on another backend."""
    if request.path.name.endswith("_gpu.py") and "node" in request.fixturenames:
        assert request.getfixturevalue("node").backend == "cuda"


@pytest.fixture
def cupy() -> Any:
    """The package, which is not there on machines that collect these tests and have no GPU."""
    import cupy

    return cupy


@pytest.fixture
def stream() -> Generator[Any]:
    """A stream of the test's own, which is the current one."""
    import cupy

    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        yield side
    if side.is_capturing():  # of a test that failed: amid a capture no other one can go on
        side.end_capture()


@pytest.fixture
def streams() -> list[Any]:
    """Two that are not."""
    import cupy

    return [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]


@pytest.fixture(scope="module")
def viewer(comm: Any) -> Generator[Viewer | None]:
    """A process outside the job, of rank 0."""
    viewer = Viewer() if comm.rank == 0 else None
    yield viewer
    if viewer:
        viewer.close()


@pytest.fixture
def view(node: Any, viewer: Viewer | None) -> Generator[SharedViewer]:
    """Runs source in it."""
    shared = SharedViewer(node, viewer)
    yield shared
    shared.reset()

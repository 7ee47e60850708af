"""The fixtures `viewer` and `view`: a plugin that pytest must be the first to import."""

from collections.abc import Generator
from typing import Any

import pytest

from tests.helpers.viewer import SharedViewer, Viewer


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

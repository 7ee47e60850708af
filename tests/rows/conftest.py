"""Where the tests of rows in GPU memory run."""

import pytest

from tests.helpers.captures import skip_where_ranks_take_turns


@pytest.fixture(autouse=True)
def _kernels_may_wait(request: pytest.FixtureRequest) -> None:
    """Skip those on GPUs where the plan is refused: kernels would wait for ranks without a turn."""
    if request.path.stem.endswith("_gpu"):
        skip_where_ranks_take_turns(request.getfixturevalue("node"))

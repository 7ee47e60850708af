"""Where the tests of rows run."""

import pytest

from tests.helpers.captures import skip_where_ranks_take_turns


@pytest.fixture(autouse=True)
def _kernels_may_wait(request: pytest.FixtureRequest) -> None:
    """Skip on GPUs where the plan is refused: its kernels would wait for ranks without a turn."""
    if request.path.stem.endswith(("_ranks", "_gpu")):
        skip_where_ranks_take_turns(request.getfixturevalue("node"))

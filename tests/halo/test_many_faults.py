"""Programs that close none of their plans."""

import numpy as np
import pytest

import mpishare
from tests.helpers.scenes import play
from tests.helpers.scenes_halo import play_on
from tests.helpers.stage import Stage


def left_open(stage: Stage, is_given: bool) -> None:
    node = stage.node() if is_given else None
    fields = np.arange(6.0) + 10 * stage.rank
    x = node.allocate_each(6, fill=1.0).array if is_given else np.ones(6)
    stage.ring(node, fields).exchange(fields)
    mpishare.Allreduce(stage.world, x, node=node).reduce(x)
    here = {stage.rank: [1]}, {stage.rank: [2]}
    mpishare.NeighborExchange(stage.world, *here, fields, node=node).start(fields.copy())
    left, right = (stage.rank - 1) % stage.size, (stage.rank + 1) % stage.size
    assert [*fields[[0, 5]], x[0]] == [10 * left + 4, 10 * right + 1, stage.size]


@pytest.mark.parametrize("is_given", [True, False], ids=["node given", "node kept"])
@pytest.mark.parametrize("nodes", ["", "2 + 2"])
def test_a_program_that_closes_nothing(nodes, is_given):
    """It ends with status 0, and says nothing."""
    played = play_on(nodes, left_open, is_given) if nodes else play(2, left_open, is_given)
    played.ended_well()

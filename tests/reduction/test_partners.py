"""Who sends the result of a node to whom, where NCCL reduces over nodes, and what it combines."""

import numpy as np
import pytest

from mpishare.backends.nccl import combines
from mpishare.reduction.partners import nodes_of, partners, shares_of


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (1, 3), (3, 1), (4, 3), (2, 5, 1), (4, 4, 4, 4)])
def test_each_rank_gets_the_result_of_each_other_node_once(sizes):
    names = [f"node {at}" for at, size in enumerate(sizes) for _ in range(size)]
    found = nodes_of(names)
    assert [len(ranks) for ranks in found] == [*sizes]
    for ours in found:
        for theirs in found:
            if ours is theirs:
                continue
            sent = [(me, to) for me in ours for to in partners(ours, theirs, me)[1]]
            wanted = [(partners(theirs, ours, to)[0], to) for to in theirs]
            assert sorted(sent) == sorted(wanted)


def test_ranks_that_are_dealt_out_are_in_the_order_of_the_lowest():
    assert nodes_of(["b", "a", "b", "a"]) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("count", [0, 1, 7, 64])
def test_shares_are_all_elements_once(count):
    shares = shares_of(count, 5)
    assert [at for each in shares for at in range(count)[each]] == [*range(count)]


@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize("name", ["sum", "prod", "max", "min", "maxloc", "band"])
def test_nccl_combines_what_has_no_order(name, nranks):
    """Numbers of three ranks are rounded twice, and a NaN is the largest one here."""
    names = ("sum", "prod", "max", "min")
    found = {each: combines(np.dtype(each), name, nranks) for each in ("u1", "i4", "f2", "f8")}
    of_floats = nranks == 2 and name in ("sum", "prod")
    assert found == {"u1": name in names, "i4": name in names, "f2": of_floats, "f8": of_floats}
    assert not any(combines(np.dtype(each), name, nranks) for each in ("?", "i2", "c16"))

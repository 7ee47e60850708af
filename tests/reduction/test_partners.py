"""Who sends the result of a node to whom, where NCCL reduces over nodes."""

import pytest

from mpishare.reduction.cuda.partners import nodes_of, partners, shares_of


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
    assert [at for each in shares.values() for at in range(count)[each]] == [*range(count)]

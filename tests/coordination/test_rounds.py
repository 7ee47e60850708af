"""The rounds of a fence: after the last one each rank has waited for all others."""

import pytest

from mpishare.coordination.rounds import rounds


def heard(size, radix):
    """Of which ranks each rank has heard in the end."""
    all_rounds = [rounds(rank, size, radix) for rank in range(size)]
    known = [{rank} for rank in range(size)]
    for number in range(len(all_rounds[0])):
        before = [{*each} for each in known]
        for rank, each in enumerate(all_rounds):
            assert rank not in each[number]
            known[rank].update(*(before[source] for source in each[number]))
    return known


@pytest.mark.parametrize("radix", [2, 3, 4, 8, 64])
def test_each_rank_hears_of_all(radix):
    for size in range(1, 64):
        assert heard(size, radix) == [{*range(size)}] * size


@pytest.mark.parametrize(
    ("size", "radix", "waits"), [(4, 8, [3]), (32, 8, [7, 3]), (32, 2, [1] * 5)]
)
def test_so_many_waits_in_so_many_rounds(size, radix, waits):
    assert [*map(len, rounds(0, size, radix))] == waits


def test_a_rank_alone_waits_for_nobody():
    assert rounds(0, 1) == [[]]

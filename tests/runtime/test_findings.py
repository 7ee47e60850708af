"""What a node of some ranks takes over from one of more: renumbered, and of these ranks alone."""

from itertools import product
from types import SimpleNamespace

from mpishare.runtime.places import Findings, Probed, known_to_all
from mpishare.runtime.report import Pair

UUIDS = ["GPU-a", "GPU-b", "GPU-a", "GPU-c"]


def pair(origin, target):
    reason = f"{origin} to {target}"
    return Pair(origin, target, True, True, True, True, "NVLink", "", reason)


PROBED = Probed(UUIDS, tuple(pair(*each) for each in product(range(4), repeat=2)))
UNREADABLE = ((0, 1, "a"), (0, 3, "b"), (2, 0, "c"), (2, 3, "d"))
FOUND = Findings(["boot", 1, 2], UNREADABLE, PROBED)


def test_some_ranks_in_another_order():
    found = FOUND.of([2, 0])
    assert found.unreadable == ((0, 1, "c"),)
    assert found.probed.uuids == ["GPU-a", "GPU-a"]
    told = [(each.origin, each.target, each.reason) for each in found.probed.pairs]
    assert told == [(0, 0, "2 to 2"), (0, 1, "2 to 0"), (1, 0, "0 to 2"), (1, 1, "0 to 0")]


def test_all_ranks_in_their_order():
    assert FOUND.of(range(4)).probed == PROBED


def test_only_what_all_ranks_have():
    other = Findings(["another"], *FOUND[1:])
    mine = {"m": SimpleNamespace(findings=other), "n": SimpleNamespace(findings=FOUND)}
    assert known_to_all([{"m": 0, "n": 1}, {"n": 0}], mine) == FOUND.of([1, 0])
    assert known_to_all([{"m": 0}, {"n": 0}], mine) is None
    assert known_to_all([{}, {}], mine) is None
    assert known_to_all([{"m": 1, "n": 0}, {"n": 3, "m": 2}], mine) == other.of([1, 2])

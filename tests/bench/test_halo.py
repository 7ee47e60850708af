"""The halo cases of the benchmark: every arm is right, and one that is not is found."""

import json

import pytest

from tests.helpers.benches import (
    BENCHMARKS,
    HOST,
    QUICK,
    altered,
    check_all_ok,
    check_rows,
    measured,
    wrong_arms,
)
from tests.helpers.launch import run_ranks, run_right

CASES = ("halo1d", "halo3d")
OWN = {"window fields", "private fields"}
RIVALS = {"sendrecv", "isend", "persistent", "neighborhood types", "datatypes"}
SMALL = ("--min", "512", "--max", "512", "--format", "json", *QUICK)
WITH_CORNERS = ("--corners", "--fields", "2", "--width", "2")


def exchanging(mutant: str) -> str:
    """The benchmark with another exchange."""
    name = "mpishare.HaloExchange.exchange"
    return altered(f"exchange = {name}\n{mutant}\n{name} = mutant")


# The sides of the first axis are taken for each other; on two ranks they have the same owner.
SIDES_SWAPPED = exchanging("""
def mutant(self, *fields, stream=None):
    exchange(self, *fields)
    for field in fields:
        field[[0, -1]] = field[[-1, 0]]
""")

FIELDS_SWAPPED = exchanging("""
def mutant(self, *fields, stream=None):
    exchange(self, *fields)
    fields[0][0], fields[1][0] = fields[1][0].copy(), fields[0][0].copy()
""")

A_CORNER_LESS = exchanging("""
def mutant(self, *fields, stream=None):
    kept = fields[-1][0, 0].copy()
    exchange(self, *fields)
    fields[-1][0, 0] = kept
""")

# After so many steps that the checks before the timed blocks are over.
LATER = exchanging("""
calls = {}
def mutant(self, *fields, stream=None):
    calls[self] = calls.get(self, 0) + 1
    if calls[self] < 10:
        exchange(self, *fields)
""")

RIVAL_WITHOUT_UNPACKING = altered("""
from mpishare.bench import halo, mpi
persistent, copies_of = mpi.persistent, mpi.copies_of
def mutant(problem, *fields):
    mpi.copies_of = lambda of: (copies_of(of)[0], copies_of(of)[1][1:])
    bound = persistent(problem, *fields)
    mpi.copies_of = copies_of
    return bound
halo._MPI["persistent"] = mutant
""")


@pytest.mark.parametrize(
    ("ranks", "options"), [(2, ()), (1, WITH_CORNERS), (2, WITH_CORNERS), (4, WITH_CORNERS)]
)
def test_every_arm_is_right(ranks: int, options: tuple[str, ...]) -> None:
    result = run_right(ranks, BENCHMARKS, [*CASES, *SMALL, *options], timeout_s=60)
    assert not result.stderr.strip(), result.describe()
    rows = json.loads(result.stdout)["rows"]
    check_rows(rows, ranks)
    check_all_ok(rows)
    for case in CASES:
        found = [row for row in rows if row["case"] == case]
        arms = OWN | RIVALS
        assert {row["arm"] for row in found} == arms
        assert len(found) == 2 * len(arms)
        for row in found:
            assert row["kind"] == ("rival" if row["arm"] in RIVALS else "own"), row
            assert (row["ratio"] is None) == (row["arm"] in RIVALS), row
            expected = (2, 2, True) if options else (1, 1, False)
            assert (row["width"], row["fields"], row["corners"]) == expected, row


def test_rows_say_what_the_block_came_to() -> None:
    words = ["--min", "8", "--max", "4KiB", "--against", "none", *QUICK, "--width", "3"]
    found: dict[str, list[tuple[int, int]]] = {}
    for row in measured(2, BENCHMARKS, *CASES, *words)["rows"]:
        assert row["gb_per_s"] is not None
        if (row["arm"], row["clock"]) == ("private fields", "latency"):
            found.setdefault(row["case"], []).append((row["n"], row["nbytes"]))
    # n, and the bytes of a face; the smallest blocks are as large as the width, and come once.
    assert found == {
        "halo1d": [(12, 3 * 8), (12, 3 * 21 * 8), (12, 3 * 170 * 8)],
        "halo3d": [(3, 3 * 3 * 3 * 8), (5, 3 * 5 * 5 * 8), (13, 3 * 13 * 13 * 8)],
    }


@pytest.mark.parametrize(
    ("program", "options", "wrong"),
    [
        pytest.param(SIDES_SWAPPED, (), OWN, id="sides-swapped"),
        pytest.param(FIELDS_SWAPPED, ("--fields", "2"), OWN, id="fields-swapped"),
        pytest.param(A_CORNER_LESS, ("--corners", "--fields", "2"), OWN, id="a-corner-less"),
        pytest.param(RIVAL_WITHOUT_UNPACKING, (), {"persistent"}, id="rival"),
    ],
)
def test_a_wrong_exchange_is_seen(program: str, options: tuple[str, ...], wrong: set[str]) -> None:
    words = ["halo3d", *SMALL, "--against", "persistent", *options]
    assert wrong_arms(2, program, *words) == wrong


def test_an_exchange_that_is_wrong_later_is_seen_in_a_timed_block() -> None:
    words = ["halo3d", *SMALL, "--against", "none"]
    result = run_ranks(2, LATER, args=words, env=HOST)
    assert result.returncode == 1, result.describe()
    reasons = {row["reason"] for row in json.loads(result.stdout)["rows"]}
    assert all("before the timed" not in reason for reason in reasons), result.describe()

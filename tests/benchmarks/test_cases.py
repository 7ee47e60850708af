"""The cases and baselines of benchmarks/: every one runs, and one that is wrong is found."""

from functools import partial

import pytest

from benchmarks import catalog
from tests.helpers.benches import (
    BENCHMARKS,
    QUICK,
    altered,
    check_all_ok,
    checked_rows,
    measured,
    wrong_arms,
)

catalog.extend()

changed = partial(altered, main="benchmarks.__main__")

# One neighbor never gets its face.
WITHOUT_A_FACE = changed("""
from benchmarks.ring import WindowRing

store = WindowRing.store

def store_but_one(self):
    if self.places == 1:  # between post, start, complete and wait
        del self.copies[0][1:]
    store(self)

WindowRing.store = store_but_one
""")


# One word of each copy is another, which no order can mend.
WITH_A_WRONG_WORD = changed("""
from benchmarks.ring import WindowRing

store = WindowRing.store

def store_and_spoil(self):
    store(self)
    for ghosts, _ in self.copies[self.place]:
        ghosts[-1] += 1

WindowRing.store = store_and_spoil
""")

# The ghosts of a solve never come.
WITHOUT_GHOSTS = changed("""
class Deaf(mpishare.HaloExchange):
    def start(self, *fields, stream=None):
        pass

    def wait(self, stream=None):
        pass

mpishare.HaloExchange = Deaf
""")


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_ring(ranks: int) -> None:
    rows = checked_rows(ranks, BENCHMARKS, "ring", "--max", "4KiB", *QUICK)
    assert all(row["ok"] for row in rows), rows
    arms = {"window pairwise", "window fence", "isend", "persistent", "sendrecv"}
    assert {row["arm"] for row in rows} == arms


SOLVE = ("cg", "--min", "512", "--max", "512", "--repeat", "2")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_conjugate_gradients(ranks: int) -> None:
    rows = checked_rows(ranks, BENCHMARKS, *SOLVE)
    assert {row["arm"]: row["ok"] for row in rows} == {
        "calls": True,
        "calls, dot": True,
        "isend": ranks > 1,
    }
    assert {(row["nbytes"], row["clock"]) for row in rows} == {(512, "throughput")}


def test_a_solve_without_ghosts_is_a_wrong_result() -> None:
    assert wrong_arms(2, WITHOUT_GHOSTS, *SOLVE) == {"calls", "calls, dot"}


SUMS = {"accumulate", "sums given back", "in two calls", "exchange", "sendrecv"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_cases_that_run_by_their_names_alone(ranks: int) -> None:
    cases = ("faces", "calls", "fresh", "messages1d", "rows", "accumulate1d", "accumulate3d")
    rows = checked_rows(ranks, BENCHMARKS, *cases, "--max", "4KiB", "--repeat", "2")
    check_all_ok(rows)
    arms = {case: {row["arm"] for row in rows if row["case"] == case} for case in cases}
    assert arms == {
        "faces": {"last axis", "first axis"},
        "accumulate1d": SUMS,
        "accumulate3d": SUMS,
        "calls": {"2 neighbors, 1 field", "26 neighbors, 16 fields"},
        "messages1d": {"messages", "through the host", "persistent"},
        "rows": {"rows", "migrate", "sendrecv", "alltoallv"},
        "fresh": {"new arrays", "arrays in turn", "kept, copied", "kept array", "sendrecv"},
    }


@pytest.mark.parametrize("ranks", [2, 3])
def test_two_ranks_by_the_host_and_why_not_by_kernels(ranks: int) -> None:
    words = ("pingpong", "swap", "--max", "64KiB", "--against", "nvshmem", *QUICK)
    rows = checked_rows(ranks, BENCHMARKS, *words)
    by_host = {"halo, windows", "halo", "fence", "post .. wait"}
    assert {row["arm"] for row in rows if row["ok"]} == (by_host if ranks == 2 else set())
    reasons = {row["arm"]: row["reason"] for row in rows if not row["ok"]}
    assert {"put_signal", "put_word", "kernel, 16 blocks"} <= set(reasons)
    why = "the host backend has no kernels" if ranks == 2 else "between two ranks of one node"
    assert all(why in reason for reason in reasons.values()), reasons


@pytest.mark.timeout(150)  # JAX takes its time to compile
def test_steps_of_jax_with_and_without_the_exchange() -> None:
    pytest.importorskip("jax", reason="JAX is not installed")
    words = ("jax", "--max", "8", "--iters", "2", "--repeat", "1", "--against", "all")
    rows = {row["arm"]: row for row in measured(2, BENCHMARKS, *words, timeout_s=140)["rows"]}
    forms = {"loop", "recorded", "unrolled", "padded"}
    expected = forms | {f"{form} alone" for form in forms} | {"exchange called"}
    assert {arm for arm in rows if rows[arm]["ok"]} >= expected, rows
    for arm in set(rows) - expected:
        assert "mpi4jax" in arm
        assert rows[arm]["ok"] or "cannot be imported" in rows[arm]["reason"]


def test_a_ring_without_a_face_is_seen() -> None:
    assert wrong_arms(4, WITHOUT_A_FACE, "ring", "--max", "512") == {"window pairwise"}


def test_a_swap_that_brings_another_word_is_seen() -> None:
    assert wrong_arms(2, WITH_A_WRONG_WORD, "swap", "--max", "8") == {"fence", "post .. wait"}


def test_the_cases_of_the_package_are_there_too() -> None:
    """With the baselines that stand here, and a note on one that the backend lacks."""
    words = ("halo3d", "fence", "--max", "512", "--against", "isend,nvshmem", *QUICK)
    found = measured(2, BENCHMARKS, *words)
    assert " mpirun -n 2 python -m benchmarks halo3d fence " in found["header"]["command"]
    check_all_ok(found["rows"])
    assert found["header"]["notes"][-1:] == [
        "the host backend has no baseline nvshmem of these cases"
    ]

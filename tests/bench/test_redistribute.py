"""Redistributions in the benchmark: every arm is right, and one that is not is found."""

import numpy as np
import pytest

from mpishare.bench.copies import box_row
from tests.helpers.benches import (
    BENCH,
    QUICK,
    altered,
    check_all_ok,
    checked_rows,
    measured,
    rivals,
    wrong_arms,
)

TRANSPOSES, OWN = ("redistribute", "permuted"), {"private", "windows"}
RIVALS = {"alltoallw", "alltoallv"}
SMALL = ("--min", "4KiB", "--max", "4KiB", *QUICK)

# The arms of an MPI that takes GPU memory, which takes that of the host too.
ON_HOST = altered("""
from mpishare.bench import cases

for name in ("redistribute", "permuted", "allgather"):
    cases.CASES[name].baselines["host"] += ("mpi",)
""")

# One word of each result, as if a cell of the wrong place had come.
A_CELL_OF_ANOTHER_PLACE = altered("""
forward = mpishare.Redistribute.forward

def mutant(self, a, out=None, stream=None):
    forward(self, a, out, stream)
    words = out.view("u8").reshape(-1)
    words[0], words[-1] = words[-1], words[0].copy()

mpishare.Redistribute.forward = mutant
""")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_arm_is_right(ranks: int) -> None:
    """On three ranks parts are uneven."""
    rows = checked_rows(ranks, BENCH, *TRANSPOSES, "allgather", *SMALL)
    check_all_ok(rows)
    n = {1: 6, 2: 8, 3: 9}[ranks]
    for case in TRANSPOSES:
        found = [row for row in rows if row["case"] == case]
        assert {row["arm"] for row in found} == OWN | RIVALS
        for row in found:
            assert (row["n"], row["nbytes"]) == (n, 16 * n**3 // ranks), row
            assert row["kind"] == ("own" if row["arm"] in OWN else "rival"), row
            assert (row["ratio"] is None) == (row["arm"] in RIVALS), row
    gathers = [row for row in rows if row["case"] == "allgather"]
    assert {row["arm"] for row in gathers} == OWN | {"allgather"}
    assert {row["nbytes"] for row in gathers} == {4096}


def test_sizes_come_near_the_part_and_come_once() -> None:
    words = ("redistribute", "--max", "64KiB", "--against", "none", *QUICK)
    found = {row["n"]: row["nbytes"] for row in measured(3, BENCH, *words)["rows"]}
    # 8 B make 2 cells along an axis; the last rank has none of them.
    assert found == {n: 16 * n**3 // 3 for n in (2, 5, 9, 23)}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_gpus_do_moves_every_word_on_the_host(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPISHARE_GPU_AWARE_MPI", "1")  # there is no GPU here
    rows = rivals(ranks, ON_HOST, *TRANSPOSES, "allgather", *SMALL, "--against", "mpi")
    arms = {(row["case"], row["arm"]) for row in rows}
    assert arms == {(case, "mpi") for case in (*TRANSPOSES, "allgather")}
    assert all(row["ok"] for row in rows), rows


@pytest.mark.parametrize("case", [*TRANSPOSES, "allgather"])
def test_a_wrong_result_is_seen(case: str) -> None:
    assert wrong_arms(2, A_CELL_OF_ANOTHER_PLACE, case, *SMALL) == OWN


@pytest.mark.parametrize("dtype", ["f8", "c16"])
def test_the_kernel_copies_each_cell_to_its_place(dtype: str) -> None:
    """What the kernel does with a row of its table, by NumPy."""
    rng = np.random.default_rng(1)
    for shape in ((6,), (5, 7), (4, 5, 6), (1, 1, 1), (3, 2, 4, 2)):
        whole = rng.random(tuple(n + 2 for n in shape)).astype(dtype)
        source = whole[tuple(slice(1, n + 1) for n in shape)]
        for order in (range(len(shape)), [*range(1, len(shape)), 0]):
            out = np.zeros([shape[axis] for axis in order], dtype)
            target = out.transpose(np.argsort([*order]))
            ends = out.ctypes.data, source.ctypes.data
            _, _, *numbers = box_row(*ends, target, source)
            n, to, steps = numbers[:4], numbers[4:8], numbers[8:]
            assert n[-1] == 1 or to[-1] == target.itemsize  # threads store side by side
            flat = whole.view("u1").reshape(-1)
            first = source.ctypes.data - whole.ctypes.data
            for at in np.ndindex(*n):
                begin = first + int(np.dot(at, steps))
                place = int(np.dot(at, to))
                cell = flat[begin : begin + whole.itemsize]
                out.view("u1").reshape(-1)[place : place + out.itemsize] = cell
            assert (target == source).all(), (shape, order)

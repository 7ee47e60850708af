"""The baselines between GPUs, tried on host memory: the variants."""

import pytest

from benchmarks import catalog
from tests.helpers.benches import QUICK, rivals

catalog.extend()  # ring
AGAINST = ("--against", "mpi", *QUICK)

# The library that takes pointers to a GPU takes those to host memory too.
ON_HOST = """
import os
import sys
from benchmarks import catalog
from benchmarks.__main__ import main
from mpishare.bench import cases, cuda_mpi, library

os.environ["MPISHARE_GPU_AWARE_MPI"] = "1"  # there is no GPU here
catalog.extend()
for name in ("ring", "halo1d"):
    cases.CASES[name].baselines["host"] += ("mpi", "nccl")
{change}
sys.exit(main(sys.argv[1:]))
"""


NO_TRIAL_PASSED = """
from mpishare import UnsupportedError
def require(cls, session):
    if session.comm.rank == 1:
        raise UnsupportedError("MPI: rank 1 cannot")
cuda_mpi.CudaMpi.require = classmethod(require)
"""


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_variants_of_a_library_move_every_word(ranks: int) -> None:
    found = rivals(ranks, ON_HOST.format(change=""), "ring", "halo1d", "--max", "512", *AGAINST)
    assert len(found) == 2 * 2 * 2  # cases, sizes, clocks
    assert all(row["ok"] and row["arm"] == "mpi" for row in found), found


IN_PLACE = """
usages = cases.BASELINES["mpi"].usages
usages["mpi in place"] = cases.Usage("CudaMpi", in_place=True)
"""


@pytest.mark.parametrize("ranks", [1, 3])
def test_fields_in_memory_of_a_library_are_exchanged_in_place(ranks: int) -> None:
    program = ON_HOST.format(change=IN_PLACE)
    rows = rivals(ranks, program, "ring", "halo1d", "--max", "512", *AGAINST)
    found = [row for row in rows if row["arm"] == "mpi in place"]
    # The buffers of a ring are memory of the library anyway.
    assert [row["case"] for row in found] == ["halo1d"] * 2 * 2  # sizes, clocks
    assert all(row["ok"] for row in found), found


def test_a_library_that_one_rank_lacks_is_a_row_with_its_reason() -> None:
    rows = rivals(2, ON_HOST.format(change=NO_TRIAL_PASSED), "ring", "--max", "512", *AGAINST)
    assert [row["reason"] for row in rows] == ["MPI: rank 1 cannot"] * 4, rows

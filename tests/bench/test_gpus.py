"""The benchmark on GPUs: every arm runs there, and every check passes."""

import json
import sys

import pytest

from mpishare.bench.cases import default_cases
from tests.bench.test_cli import WITHOUT_FENCE
from tests.helpers.launch import run_ranks

CUDA = {"MPISHARE_BACKEND": "cuda"}
QUICK = ("--format", "json", "--iters", "10", "--repeat", "2", "--warmup", "1")


@pytest.mark.gpu
@pytest.mark.limit(100)
@pytest.mark.parametrize("ranks", [1, 4])
def test_every_arm_is_right(ranks: int) -> None:
    command = [sys.executable, "-m", "mpishare.bench", "--max", "64KiB", *QUICK]
    result = run_ranks(ranks, command, timeout_s=90, env=CUDA)
    assert result.returncode == 0, result.describe()
    found = json.loads(result.stdout)
    assert {row["case"] for row in found["rows"]} == set(default_cases())
    own = [row for row in found["rows"] if row["kind"] == "own"]
    assert all(row["ok"] for row in own), result.describe()
    # NCCL may be missing, or refuse a GPU that ranks share.
    absent = [row for row in found["rows"] if not row["ok"]]
    assert all(row["arm"].startswith("nccl") and row["reason"] for row in absent), result.describe()
    header = found["header"]
    assert header["backend"] == "cuda"
    assert sum(len(gpu["ranks"]) for gpu in header["gpus"]) == ranks
    assert len(header["links"]) == ranks * (ranks - 1)
    for name in ("cupy", "cuda-bindings"):
        assert header["versions"][name], name
    assert header["cuda"]
    crowded = any(len(gpu["ranks"]) > 1 and not gpu["mps"] for gpu in header["gpus"])
    assert bool(header["notes"]) == crowded


@pytest.mark.gpu
@pytest.mark.limit(100)
def test_a_rival_is_right_or_says_why_not_and_ceilings_are_checked() -> None:
    words = ["ring", "halo1d", "halo3d", "--against", "all", "--min", "64KiB", "--max", "64KiB"]
    command = [sys.executable, "-m", "benchmarks", *words, *QUICK]
    result = run_ranks(2, command, timeout_s=95, env=CUDA)
    assert result.returncode == 0, result.describe()
    found = json.loads(result.stdout)
    rows = found["rows"]
    arms = {row["arm"] for row in rows if row["kind"] == "rival"}
    assert {"staged", "mpi", "nccl", "nccl graph", "nvshmem", "torch"} <= arms
    crowded = any(len(gpu["ranks"]) > 1 for gpu in found["header"]["gpus"])
    for row in rows:
        assert row["ok"] == (row["reason"] is None), row
        if row["arm"] in ("nccl", "nccl graph") and not crowded:
            assert row["ok"] or "not installed" in row["reason"], row
        if row["kind"] == "ceiling":
            assert row["ratio"] is None, row
            assert row["ok"] or (crowded and row["arm"] == "flag hop"), row


@pytest.mark.gpu
@pytest.mark.limit(100)
def test_a_missing_fence_is_seen() -> None:
    result = run_ranks(2, WITHOUT_FENCE, args=["fence", *QUICK], timeout_s=90, env=CUDA)
    assert result.returncode == 1, result.describe()
    wrong = {row["arm"] for row in json.loads(result.stdout)["rows"] if not row["ok"]}
    assert wrong == {"fence"}, result.describe()


@pytest.mark.gpu
@pytest.mark.limit(100)
def test_sums_are_right_and_rivals_too_or_say_why_not() -> None:
    words = ["allreduce", "dot", "--against", "all", "--min", "8", "--max", "64KiB"]
    command = [sys.executable, "-m", "benchmarks", *words, *QUICK]
    result = run_ranks(2, command, timeout_s=95, env=CUDA)
    assert result.returncode == 0, result.describe()
    rows = json.loads(result.stdout)["rows"]
    own = {row["arm"] for row in rows if row["kind"] == "own"}
    assert own == {"reduce", "reduce graph", "reduce graph of 20", "complex128", "dot"}
    assert all(row["ok"] for row in rows if row["kind"] == "own"), result.describe()
    assert all(row["ok"] or row["reason"] for row in rows), result.describe()
    assert {"staged", "float", "nccl", "nccl graph of 20"} <= {row["arm"] for row in rows}


@pytest.mark.gpu
@pytest.mark.limit(100)
@pytest.mark.parametrize("ranks", [2, 4])
def test_redistributions_are_right_and_rivals_too_or_say_why_not(ranks: int) -> None:
    words = ["redistribute", "permuted", "allgather", "--against", "staged,nccl"]
    command = [sys.executable, "-m", "mpishare.bench", *words, "--max", "64KiB", *QUICK]
    result = run_ranks(ranks, command, timeout_s=95, env=CUDA)
    assert result.returncode == 0, result.describe()
    rows = json.loads(result.stdout)["rows"]
    assert all(row["ok"] or row["reason"] for row in rows), result.describe()
    own = {(row["case"], row["arm"]) for row in rows if row["kind"] == "own"}
    forms = [f"{where}{form}" for where in ("private", "windows") for form in ("", " graph")]
    assert own >= {(case, form) for case in words[:3] for form in forms}
    assert ("allgather", "private graph of 20") in own
    for row in rows:
        assert row["ok"] or row["arm"].startswith("nccl"), row


@pytest.mark.gpu
@pytest.mark.limit(100)
def test_kernels_of_two_ranks_are_right_and_rivals_too_or_say_why_not() -> None:
    words = ["pingpong", "swap", "--against", "all", "--max", "64KiB", "--seconds", "60"]
    command = [sys.executable, "-m", "benchmarks", *words, *QUICK]
    result = run_ranks(2, command, timeout_s=95, env=CUDA)
    assert result.returncode == 0, result.describe()
    found = json.loads(result.stdout)
    rows = found["rows"]
    crowded = any(len(gpu["ranks"]) > 1 and not gpu["mps"] for gpu in found["header"]["gpus"])
    for row in rows:
        by_host = row["arm"].startswith(("halo", "fence", "post"))
        assert row["ok"] or row["reason"], row
        assert row["ok"] or row["kind"] == "rival" or (crowded and not by_host), row
    arms = {row["arm"] for row in rows}
    assert {"put_signal", "put_word", "nvshmem put_signal", "nccl barrier", "nccl words"} <= arms

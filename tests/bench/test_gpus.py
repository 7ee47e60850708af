"""The benchmark on GPUs: every arm runs there, and every check passes."""

import json
import sys

import pytest

from mpishare.bench.cases import default_cases
from tests.helpers.benches import WITHOUT_FENCE
from tests.helpers.launch import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(100)]
CUDA = {"MPISHARE_BACKEND": "cuda"}
QUICK = ("--format", "json", "--iters", "10", "--repeat", "2", "--warmup", "1")


def measured(ranks: int, module: str, *words: str) -> tuple[dict, list[dict]]:
    """Return the header and the rows of a run on GPUs, which must end well."""
    command = [sys.executable, "-m", module, *words, *QUICK]
    result = run_ranks(ranks, command, timeout_s=95, env=CUDA)
    assert result.returncode == 0, result.describe()
    found = json.loads(result.stdout)
    rows = found["rows"]
    assert all(row["ok"] == (row["reason"] is None) for row in rows), result.describe()
    return found["header"], rows


def failed(rows: list[dict], kind: str = "") -> list[dict]:
    """Return the rows that have no number, of all kinds or of one."""
    return [row for row in rows if not row["ok"] and kind in ("", row["kind"])]


def take_turns(header: dict) -> bool:
    """Whether ranks share a GPU without MPS."""
    return any(len(gpu["ranks"]) > 1 and not gpu["mps"] for gpu in header["gpus"])


def uncaptured(header: dict, rows: list[dict]) -> set[str]:
    """Return the arms of sums in graphs where ranks take turns of a GPU: the host makes sums there,
    which no graph captures."""
    return {row["arm"] for row in rows if take_turns(header) and row["arm"].startswith("reduce gr")}


@pytest.mark.parametrize("ranks", [1, 4])
def test_every_arm_is_right(ranks: int) -> None:
    header, rows = measured(ranks, "mpishare.bench", "--max", "64KiB")
    assert {row["case"] for row in rows} == set(default_cases())
    assert {row["arm"] for row in failed(rows, "own")} == uncaptured(header, rows)
    # NCCL may be missing, or refuse a GPU that ranks share.
    others = [row for row in failed(rows) if row["kind"] != "own"]
    assert all(row["arm"].startswith("nccl") for row in others), others
    assert header["backend"] == "cuda"
    assert sum(len(gpu["ranks"]) for gpu in header["gpus"]) == ranks
    assert bool(header["links"]) == (ranks > 1)
    for name in ("cupy", "cuda-bindings"):
        assert header["versions"][name], name
    assert header["cuda"]
    assert bool(header["notes"]) == take_turns(header)


def test_a_rival_is_right_or_says_why_not() -> None:
    words = ["ring", "halo1d", "halo3d", "--against", "all", "--min", "64KiB", "--max", "64KiB"]
    header, rows = measured(2, "benchmarks", *words)
    arms = {row["arm"] for row in rows if row["kind"] == "rival"}
    assert {"staged", "mpi", "nccl", "nccl graph", "nvshmem", "torch"} <= arms
    crowded = any(len(gpu["ranks"]) > 1 for gpu in header["gpus"])
    for row in rows:
        if row["arm"] in ("nccl", "nccl graph") and not crowded:
            assert row["ok"] or "not installed" in row["reason"], row


def test_a_missing_fence_is_seen() -> None:
    result = run_ranks(2, WITHOUT_FENCE, args=["fence", *QUICK], timeout_s=90, env=CUDA)
    assert result.returncode == 1, result.describe()
    wrong = {row["arm"] for row in json.loads(result.stdout)["rows"] if not row["ok"]}
    assert wrong == {"fence"}, result.describe()


def test_sums_are_right_and_rivals_too_or_say_why_not() -> None:
    words = ["allreduce", "--against", "all", "--min", "8", "--max", "64KiB"]
    header, rows = measured(2, "benchmarks", *words)
    own = {row["arm"] for row in rows if row["kind"] == "own"}
    dots = {"dot", "exact", "exact dot"}
    assert own == {"reduce", "reduce graph", "reduce graph of 20", "complex128", *dots}
    assert {row["arm"] for row in failed(rows, "own")} == uncaptured(header, rows)
    assert {"staged", "float", "nccl", "nccl graph of 20"} <= {row["arm"] for row in rows}


@pytest.mark.parametrize("ranks", [2, 4])
def test_redistributions_are_right_and_rivals_too_or_say_why_not(ranks: int) -> None:
    words = ["redistribute", "permuted", "allgather", "--against", "staged,nccl"]
    _, rows = measured(ranks, "mpishare.bench", *words, "--max", "64KiB")
    own = {(row["case"], row["arm"]) for row in rows if row["kind"] == "own"}
    forms = [f"{where}{form}" for where in ("private", "windows") for form in ("", " graph")]
    assert own >= {(case, form) for case in words[:3] for form in forms}
    assert ("allgather", "private graph of 20") in own
    assert [row for row in failed(rows) if not row["arm"].startswith("nccl")] == []


def test_kernels_of_two_ranks_are_right_and_rivals_too_or_say_why_not() -> None:
    words = ["swap", "--against", "all", "--max", "64KiB", "--seconds", "60"]
    header, rows = measured(2, "benchmarks", *words)
    for row in failed(rows):
        by_host = row["arm"].startswith(("halo", "fence", "post"))
        assert row["kind"] == "rival" or (take_turns(header) and not by_host), row
    arms = {row["arm"] for row in rows}
    assert any(arm.startswith("nccl, ") for arm in arms)

"""The plasma loses its wave at the right rate on every count of ranks, and no electron."""

import json

import pytest

from tests.applications.programs import APPLICATIONS
from tests.helpers.launch import run_ranks
from tests.helpers.scenes import BACKENDS


def run(ranks: int, backend: str, *words: str) -> dict:
    env = {"MPISHARE_BACKEND": backend}
    done = run_ranks(
        ranks, APPLICATIONS / "plasma.py", args=["--json", *words], env=env, timeout_s=120
    )
    assert done.returncode == 0, done.describe()
    return json.loads(done.stdout)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("ranks", "step"), [(1, "captured"), (3, "captured"), (3, "staged")])
def test_landau_damping(ranks, step, backend):
    found = run(ranks, backend, "--step", step, "--exact")
    assert found["rate"] == pytest.approx(found["expected"], rel=0.05)
    assert (found["ranks"], found["backend"]) == (ranks, backend)

"""`mpishare.jax`: exchanges of JAX arrays in compiled programs, and their gradients."""

import sys

import pytest

from tests.helpers.launch import run_ranks

pytest.importorskip("jax", reason="JAX is not installed")

NAMES = (
    "is_padded",
    "steps_in_a_loop",
    "two_plans_keep_their_order",
    "several_fields",
    "any_fields",
    "gradients",
    "what_is_refused",
)


def check(name: str, backend: str, ranks: int) -> None:
    command = [sys.executable, "-m", "tests.helpers.jax_program", name]
    result = run_ranks(ranks, command, timeout_s=100, env={"MPISHARE_BACKEND": backend})
    assert result.returncode == 0, result.describe()
    assert result.stdout.count(f"{name}: right") == ranks, result.describe()


@pytest.mark.parametrize("name", NAMES)
def test_on_the_host(name: str) -> None:
    check(name, "host", 2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_gpus(name: str) -> None:
    check(name, "cuda", 2)

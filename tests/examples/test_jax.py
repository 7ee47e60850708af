"""`mpishare.jax`: exchanges of JAX arrays in compiled programs, and their gradients."""

import sys

import pytest

from tests.helpers.launch import Result, run_ranks

pytest.importorskip("jax", reason="JAX is not installed")

pytestmark = pytest.mark.timeout(150)
RANKS = 2
NAMES = (
    "is_padded",
    "steps_in_a_loop",
    "two_plans_keep_their_order",
    "several_fields",
    "any_fields",
    "gradients",
    "seams",
    "what_is_refused",
)
# On a GPU exchanges are made in the order of XLA's program, which is to be the same on all ranks.
ON_THE_HOST = (*NAMES, "independent_exchanges_keep_their_order", "no_graph_records_the_host")


def run(backend: str, *names: str, **env: str) -> Result:
    command = [sys.executable, "-m", "tests.examples.jax_program", *names]
    return run_ranks(RANKS, command, timeout_s=120, env={"MPISHARE_BACKEND": backend, **env})


@pytest.fixture(scope="module")
def on_the_host(request: pytest.FixtureRequest) -> Result:
    """All checks that are to run, in one job: JAX takes each process seconds to start."""
    items = [item for item in request.session.items if item.path == request.path]
    asked = [getattr(item, "callspec", None) for item in items]
    return run("host", *(each.params["name"] for each in asked if each and "name" in each.params))


@pytest.mark.parametrize("name", ON_THE_HOST)
def test_on_the_host(on_the_host: Result, name: str) -> None:
    assert on_the_host.stdout.count(f"{name}: right") == RANKS, on_the_host.describe()


def test_all_ended_well(on_the_host: Result) -> None:
    assert on_the_host.returncode == 0, on_the_host.describe()


# XLA may record calls whose ranks wait on streams, and replay them without Python.
ON_STREAMS = ("steps_in_a_loop", "two_plans_keep_their_order", "gradients")
BY_ROUTE = [(ON_STREAMS, {"MPISHARE_ROUTE": route}) for route in ("pinned", "nccl")]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("names", "env"),
    [*(((name,), {}) for name in NAMES), *BY_ROUTE],
    ids=[*NAMES, "pinned", "nccl"],
)
def test_on_gpus(names: tuple[str, ...], env: dict[str, str]) -> None:
    result = run("cuda", *names, **env)
    assert result.returncode == 0, result.describe()
    for name in names:
        assert result.stdout.count(f"{name}: right") == RANKS, result.describe()

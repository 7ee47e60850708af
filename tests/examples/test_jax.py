"""`mpishare.jax`: exchanges and sums of JAX arrays in compiled programs, and their gradients."""

import sys

import pytest

from tests.helpers.launch import Result, run_ranks

pytest.importorskip("jax", reason="JAX is not installed")

pytestmark = pytest.mark.timeout(400)
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
    "totals",
    "a_conjugate_gradient",
    "gradients_of_sums",
    "no_graph_records_messages",
    "what_sums_refuse",
)
# On a GPU calls are made in the order of XLA's program, which is to be the same on all ranks.
ON_THE_HOST = (*NAMES, "independent_exchanges_keep_their_order", "no_graph_records_the_host")
OF_SUMS = ("totals", "a_conjugate_gradient", "gradients_of_sums")


def run(backend: str, *names: str, ranks: int = RANKS, messages: str = "", **env: str) -> Result:
    command = [sys.executable, "-m", "tests.examples.jax_program", messages, *names]
    return run_ranks(ranks, command, timeout_s=360, env={"MPISHARE_BACKEND": backend, **env})


def require_right(names: tuple[str, ...], result: Result, ranks: int = RANKS) -> None:
    assert result.returncode == 0, result.describe()
    for name in names:
        assert result.stdout.count(f"{name}: right") == ranks, result.describe()


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


@pytest.mark.whole  # of two ranks above
def test_the_same_residuals_on_three_ranks() -> None:
    names = ("a_conjugate_gradient",)
    require_right(names, run("host", *names, ranks=3), 3)


def test_sums_over_two_nodes_on_the_host() -> None:
    names = ("totals", "no_graph_records_messages")
    require_right(names, run("host", *names, messages="mpi"))


@pytest.mark.whole  # of plans without JAX in `ranks-openmpi-4`
def test_sums_without_the_compiled_part() -> None:
    require_right(("totals",), run("host", "totals", MPISHARE_HOST_CODE="python"))


# XLA may record calls whose ranks wait on streams, and replay them without Python.
ON_STREAMS = ("steps_in_a_loop", "two_plans_keep_their_order", "gradients", *OF_SUMS)


@pytest.mark.gpu
@pytest.mark.parametrize("names", [(name,) for name in NAMES], ids=NAMES)
def test_on_gpus(names: tuple[str, ...]) -> None:
    require_right(names, run("cuda", *names))


@pytest.mark.gpu
@pytest.mark.parametrize("route", ["pinned", "nccl"])
def test_by_route(route: str) -> None:
    require_right(ON_STREAMS, run("cuda", *ON_STREAMS, MPISHARE_ROUTE=route))


@pytest.mark.gpu
def test_sums_of_one_gpu() -> None:
    require_right(OF_SUMS, run("cuda", *OF_SUMS, ranks=1), 1)


@pytest.mark.gpu
@pytest.mark.parametrize("messages", ["nccl", "mpi"])
def test_sums_over_two_nodes_on_gpus(messages: str) -> None:
    names = OF_SUMS if messages == "nccl" else (*OF_SUMS, "no_graph_records_messages")
    require_right(names, run("cuda", *names, messages=messages))

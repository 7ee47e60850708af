"""Rows between halves of the ranks that take each other for another machine, on GPUs."""

import pytest

from mpishare import Migration, RowExchange, UnsupportedError
from tests.helpers.captures import captured
from tests.helpers.halves import WORLD, device_of_half, node_of_half
from tests.helpers.random_rows import check_exchanges, check_migrations

TWO = pytest.mark.ranks(min=2)


@pytest.fixture(scope="module")
def half():
    with node_of_half(device_of_half()) as node:
        yield node


@TWO
@pytest.mark.parametrize("seed", range(20))
def test_random_rows(half, seed):
    """Within a half by kernels, to the other one by messages, also in larger slots."""
    for check in (check_exchanges, check_migrations):
        with check(half, WORLD, seed) as swap:
            for rank, route in swap.routes.items():
                assert (route == "mpi") == (rank not in half.ranks)


@TWO
def test_what_a_capture_refuses(half, stream, cupy):
    """By name, on all ranks; the plan goes on."""
    x, to, count = cupy.arange(8.0), cupy.full(8, WORLD.rank, "i4"), cupy.array(4)
    with RowExchange(WORLD, ["f8"], node=half) as swap:
        move = Migration(swap)
        for call in (lambda: swap.start([x], {}), lambda: move.migrate([x], to, count)):
            said = r"routes \['mpi'.*\] need the host at every call"
            with pytest.raises(UnsupportedError, match=said), captured(stream):
                call()
        move.migrate([x], to, count)
        assert int(count) == 4


@TWO
@pytest.mark.parametrize("route", ["nccl", "mpi-gpu"])
def test_routes_that_rows_do_not_take(half, route, monkeypatch):
    monkeypatch.setenv("MPISHARE_ROUTE", route)
    with pytest.raises(UnsupportedError, match=f"MPISHARE_ROUTE={route}: rows travel"):
        RowExchange(WORLD, ["f8"], node=half)

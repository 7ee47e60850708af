"""Halos: every ghost holds its owner's cell after every step, and nothing else is written."""

import gc
import logging

import numpy as np
import pytest

from mpishare import MismatchError, UnsupportedError
from tests.helpers.halos import (
    Case,
    Kind,
    arrays,
    even_case,
    exchange_step,
    exchanging,
    make_fields,
    random_plan,
    some,
)
from tests.helpers.rings import beside, ring
from tests.helpers.stage import shared_bytes

TWO = pytest.mark.ranks(min=2)
PLAIN = (Kind(),)


def step_by_step(node, case, kinds=PLAIN, steps=3, **options):
    with exchanging(node, case, kinds, **options) as (halo, fields):
        for step in range(steps):
            exchange_step(halo, fields, 10 * step)
        return halo


@pytest.mark.parametrize("naxes", [1, 2, 3, 4])
def test_random_plans(node, every_route, naxes):
    """On the host also with what CuPy has not: odd dtypes, arrays that are not aligned."""
    for seed in range(some(node, 14)):
        routes = random_plan(node, node.comm, seed, naxes=naxes)
        others = {found for rank, found in routes.items() if rank != node.rank}
        if every_route:
            assert others <= {every_route}
        elif node.backend == "host":
            assert set(routes.values()) <= {"host"}


def test_no_rank_has_cells(node, route):
    size = node.size
    width = ((2, 1),) if size == 1 else ((0, 0),)
    step_by_step(node, Case((size,), (False,), ((0,) * size,), (width,) * size), steps=2)


@TWO
def test_messages_of_the_user_are_not_taken(node, route):
    """On the same communicator, with any tag."""
    low, high = beside(node)
    comm, fields = node.comm, make_fields(node, even_case((node.size,)))
    with ring(node, arrays(fields)) as halo:
        requests = [comm.isend(f"for {high}", high, tag=tag) for tag in (0, 1, 2, 77)]
        for step in range(3):
            exchange_step(halo, fields, step)
        found = {comm.recv(source=low, tag=tag) for tag in (77, 2, 1, 0)}
        assert found == {f"for {node.rank}"}
        for request in requests:
            request.wait()


REQUIRED = [  # with MPISHARE_ROUTE and without, on two ranks or more
    ("", "host", None),
    ("", ("host",), None),
    ("", ["host", "mpi"], None),
    ("", ("fused", "host"), None),
    ("", ("fused",), (UnsupportedError, "host")),
    ("", ("copy", "fused"), (UnsupportedError, "host")),
    ("", ("mpi",), (UnsupportedError, "host")),
    ("", ("nvlink",), (ValueError, "require")),
    ("", (), (ValueError, "require")),
    ("", 3, (ValueError, "require")),
    ("mpi", ("host",), (UnsupportedError, "mpi")),
    ("mpi", ("mpi", "host"), None),
    ("nvlink", None, (ValueError, "MPISHARE_ROUTE")),
    ("HOST", None, (ValueError, "MPISHARE_ROUTE")),
    ("fused,copy", None, (ValueError, "MPISHARE_ROUTE")),
    ("fused", None, (UnsupportedError, "MPISHARE_ROUTE")),
    ("copy", None, (UnsupportedError, "MPISHARE_ROUTE")),
    ("pinned", None, (UnsupportedError, "MPISHARE_ROUTE")),
]


@TWO
def test_routes_that_are_required_or_forced(host_node, monkeypatch):
    """Refused on every rank, with the routes that there are."""
    case = even_case((host_node.size,))
    for forced, require, refusal in REQUIRED:
        monkeypatch.setenv("MPISHARE_ROUTE", forced)
        if refusal is None:
            step_by_step(host_node, case, steps=1, require=require)
        else:
            with pytest.raises(refusal[0], match=refusal[1]):
                step_by_step(host_node, case, require=require)


@pytest.mark.ranks(min=3)
def test_require_where_one_rank_alone_has_no_such_neighbor(host_node):
    """Refused on every rank, also on one whose own neighbors would do."""
    case = even_case((host_node.size,), False, 3)
    widths = (((0, 1),), *[((0, 0),)] * (host_node.size - 1))
    with pytest.raises(UnsupportedError):
        step_by_step(
            host_node, Case(case.dims, case.periods, case.splits, widths), require=("fused",)
        )


@TWO
def test_a_route_that_is_forced_on_one_rank_alone(host_node, monkeypatch):
    case = even_case((host_node.size,))
    with monkeypatch.context() as patch:
        if host_node.rank == 0:
            patch.setenv("MPISHARE_ROUTE", "mpi")
        with pytest.raises(MismatchError, match="MPISHARE_ROUTE"):
            step_by_step(host_node, case)
    step_by_step(host_node, case)


@pytest.mark.parametrize("forced", ["", "mpi"])
def test_a_slow_route_is_said_once(host_node, caplog, monkeypatch, forced):
    """One warning of the plan, on whichever rank; none of plans in shared memory."""
    monkeypatch.setenv("MPISHARE_ROUTE", forced)
    with caplog.at_level(logging.WARNING, "mpishare"):
        step_by_step(host_node, even_case((host_node.size,)))
    told = [record.getMessage() for record in caplog.records]
    every = [text for texts in host_node.comm.allgather(told) for text in texts]
    assert len(every) == bool(forced), every
    assert all("mpi" in text and "MPISHARE_ROUTE" in text for text in every)


def test_a_plan_that_was_closed_holds_no_memory(compiled_node):
    """Whoever keeps the object does not keep its staging, if that is more than a node keeps."""
    gc.collect()
    ring(compiled_node, np.zeros(6)).close()  # and with it what earlier tests have dropped
    before = shared_bytes()
    field = np.zeros((1 << 17, 4))  # packed: it is in no window, and its faces are columns
    halo = ring(compiled_node, field, axes=(1,))
    halo.exchange(field)
    assert compiled_node.size == 1 or shared_bytes() > before
    halo.close()
    assert shared_bytes() == before

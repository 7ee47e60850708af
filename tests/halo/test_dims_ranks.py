"""Halos on a plain communicator: mpishare makes the grid; what is refused about one."""

import numpy as np
import pytest
from mpi4py import MPI

import mpishare
from mpishare import MismatchError
from mpishare.halo import cartesian
from tests.helpers.halos import (
    Kind,
    arrays,
    attempt,
    check_refusal,
    even_case,
    exchange_step,
    make_fields,
    random_case,
    some,
)

TWO = pytest.mark.ranks(min=2)


def on(comm, case, fields, **options):
    """A plan of that case without a cart."""
    options = {"dims": case.dims, "periods": case.periods, **options}
    width = case.widths[comm.rank]
    return mpishare.HaloExchange(comm, arrays(fields), width, corners=case.corners, **options)


def step(halo, fields, salt):
    exchange_step(halo, fields, salt)


@pytest.mark.parametrize("part", range(2))
def test_the_ranks_stand_where_those_of_a_cart_do(node, part):
    for seed in range(10 * part, 10 * part + some(node, 8)):
        case = random_case(np.random.default_rng([seed, node.size, 15]), node.size)
        kind = Kind("i4", axes=tuple(range(case.naxes)))
        fields = make_fields(node, case, node.rank, [kind])
        with on(node.comm, case, fields, node=node) as halo:
            assert halo.grid == cartesian.Grid(case.dims, case.periods)
            step(halo, fields, seed)


def test_periods(node):
    """None by default; one flag for all axes, or one per axis; MPI's flags are ints."""
    dims = (1, node.size)
    for periods, found in [
        (None, (False, False)),
        (True, (True, True)),
        (np.False_, (False, False)),
        ((0, 1), (False, True)),
        (np.array([True, False]), (True, False)),
    ]:
        case = even_case(dims, found)
        fields = make_fields(node, case, node.rank, [Kind(axes=(0, 1))])
        with on(node.comm, case, fields, node=node, periods=periods) as halo:
            assert halo.grid.periods == found
            step(halo, fields, 1)


def test_mpi_chooses_the_extents_that_are_zero(node):
    for given in ((0, 0), (node.size, 0), [0], np.array([1, 0, 0])):
        dims = tuple(MPI.Compute_dims(node.size, list(given)))
        case = even_case(dims)
        fields = make_fields(node, case, node.rank, [Kind(axes=tuple(range(len(dims))))])
        with on(node.comm, case, fields, node=node, dims=given) as halo:
            assert halo.grid.dims == dims
            step(halo, fields, 1)


BAD = {
    "too many": ({"dims": "more"}, ValueError, "a grid of"),
    "negative": ({"dims": (-1, -1)}, ValueError, "0 or more"),
    "does not divide": ({"dims": ("more", 0)}, ValueError, "a grid of"),
    "five axes": ({"dims": (0,) * 5}, ValueError, "5 axes"),
    "no dims": ({"periods": True}, TypeError, "dims="),
    "nothing": ({}, TypeError, "dims="),
    "two periods": ({"dims": (0,), "periods": (True, True)}, ValueError, "periods"),
    "no period": ({"dims": (0,), "periods": 2}, ValueError, "periods"),
}


def filled(node, options):
    """The options, where "more" stands for one rank more than there are."""
    found = dict(options)
    dims = found.get("dims")
    if dims == "more":
        found["dims"] = (node.size + 1,)
    elif isinstance(dims, tuple):
        found["dims"] = tuple(node.size + 1 if each == "more" else each for each in dims)
    return found


@pytest.mark.parametrize("everywhere", [True, False], ids=["everywhere", "on one rank"])
def test_bad_grids(node, everywhere):
    def make(options):
        return mpishare.HaloExchange(node.comm, node.xp.zeros(6), 1, node=node, **options)

    right = {"dims": (node.size,)}
    for options, kind, words in BAD.values():
        wrong = filled(node, options)
        check_refusal(node.comm, make, wrong, right, kind, words, everywhere)


def test_a_cart_has_dims_of_its_own(node):
    cart = node.comm.Create_cart((node.size,), (True,))
    for options in ({"dims": (node.size,)}, {"periods": True}, {"dims": (1,), "periods": (1,)}):
        error, texts = attempt(
            cart,
            lambda o=options: mpishare.HaloExchange(cart, node.xp.zeros(6), 1, node=node, **o),
        )
        assert isinstance(error, ValueError), texts
        assert "leave out dims=" in str(error)
    cart.Free()


@TWO
def test_grids_that_differ(node):
    """All ranks are told each other's values."""
    last = node.rank == node.size - 1
    n = node.size
    for one, other, words in [
        ({"dims": (n, 1)}, {"dims": (1, n)}, (f"dims=[{n}, 1]", f"dims=[1, {n}]")),
        (
            {"dims": (n, 1), "periods": (True, False)},
            {"dims": (n, 1)},
            ("periods=[True, False]", "periods=[False, False]"),
        ),
    ]:
        error, texts = attempt(
            node.comm,
            lambda o=other if last else one: mpishare.HaloExchange(
                node.comm, node.xp.zeros((6, 6)), 1, node=node, **o
            ),
        )
        assert type(error) is MismatchError, texts
        assert all(word in str(error) for word in words), texts

"""Arguments that are wrong, on all ranks, on one alone, and those that differ."""

import numpy as np
import pytest
from mpi4py import MPI

import mpishare
from mpishare import ClosedError, Layout, MismatchError, Node
from mpishare.halo import cartesian
from tests.helpers.halos import (
    Kind,
    arrays,
    attempt,
    check_refusals,
    even_case,
    exchange_step,
    exchanging,
    make_fields,
    plan_without_cart,
    same_error,
)
from tests.helpers.rings import beside, ring

TWO = pytest.mark.ranks(min=2)
EVERYWHERE = pytest.mark.parametrize("everywhere", [True, False], ids=["everywhere", "on one rank"])


@pytest.fixture
def line(node):
    cart = node.comm.Create_cart((node.size,), (True,))
    yield cart
    cart.Free()


def make(node, cart, fields=None, width=1, **options):
    fields = node.xp.zeros(6) if fields is None else fields
    return mpishare.HaloExchange(cart, fields, width, node=node, **options)


def still_works(node):
    with exchanging(node, even_case((node.size,), True, 3)) as (halo, fields):
        exchange_step(halo, fields, 1)


def bad_arguments(xp):
    """Of a plan for six cells on a cart of one axis; the error and its words."""
    yield from (
        ({"width": width}, ValueError, "width must be a non-negative int")
        for width in (-1, "1", (1, 2, 3), ((1, 0), (1, 0)), None, True, (1, 0.5), ())
    )
    yield from (
        ({"axes": axes, "fields": xp.zeros((6, 6))}, ValueError, "axes= must name 1 different")
        for axes in ((), "0", (0, 0), (2,), (-3,), 1.0)
    )
    yield {"width": 4}, ValueError, "ghosts"
    yield {"fields": Layout(6, "O")}, TypeError, "objects"
    yield {"fields": Layout(6, "V0")}, TypeError, "no bytes"
    yield {"fields": Layout(1)}, ValueError, "ghosts"
    yield {"fields": Layout((6, 6))}, ValueError, "axes"
    yield {"fields": np.ma.zeros(6)}, TypeError, "field 0 is a masked array"
    yield {"fields": xp.zeros((6, 6))}, ValueError, "axes"
    yield {"axes": (1,)}, ValueError, "axes"
    yield {"fields": []}, ValueError, "field"
    yield {"fields": 3.0}, TypeError, "array"
    yield {"fields": [None]}, TypeError, "array"
    yield {"fields": [xp.zeros(6), xp.zeros(7)]}, ValueError, "cells"
    yield {"fields": [xp.zeros(6)] * 2}, ValueError, "share memory"
    yield {"corners": "no"}, TypeError, "corners must be True or False, not 'no'"
    yield {"require": ()}, ValueError, "or is None for all"
    yield {"require": ("nvlink",)}, ValueError, "require"
    yield {"dims": (6,)}, ValueError, "leave out dims="
    yield {"periods": True}, ValueError, "leave out dims="
    yield {"dims": (1,), "periods": (1,)}, ValueError, "leave out dims="


ARRAYS = [  # of NumPy
    (np.zeros(6, object), TypeError, "objects"),
    (np.zeros(6, "V0"), TypeError, "no bytes"),
    (np.zeros(6)[::-1], ValueError, "must be positive. Give a copy"),
    (np.lib.stride_tricks.as_strided(np.zeros(1), (6,), (0,)), ValueError, "strides"),
    (np.broadcast_to(1.0, 6), ValueError, ""),
]


@EVERYWHERE
def test_bad_arguments(node, host_node, line, everywhere):
    given = {"everywhere": everywhere}
    make_line = lambda options: make(node, line, **options)  # noqa: E731
    check_refusals(node.comm, make_line, {}, bad_arguments(node.xp), **given)
    make_ring = lambda array: ring(host_node, array)  # noqa: E731
    check_refusals(node.comm, make_ring, np.zeros(6), ARRAYS, **given)
    still_works(node)


def test_dims_and_periods(node):
    """No axis wraps by default; MPI's flags are ints, and it chooses the extents that are zero."""
    given = [
        ({"periods": None}, (1, node.size), (False, False)),
        ({"periods": True}, (1, node.size), (True, True)),
        ({"periods": np.False_}, (1, node.size), (False, False)),
        ({"periods": (0, 1)}, (1, node.size), (False, True)),
        ({"periods": np.array([True, False])}, (1, node.size), (True, False)),
    ]
    for zeros in ((0, 0), (node.size, 0), [0], np.array([1, 0, 0])):
        dims = tuple(MPI.Compute_dims(node.size, list(zeros)))
        given.append(({"dims": zeros}, dims, (True,) * len(dims)))
    for options, dims, periods in given:
        case = even_case(dims, periods)
        fields = make_fields(node, case, [Kind(axes=tuple(range(len(dims))))])
        with plan_without_cart(node.comm, case, arrays(fields), node=node, **options) as halo:
            assert halo.grid == cartesian.Grid(dims, periods)
            exchange_step(halo, fields, 1)


def bad_grids(size):
    more, no_dims = size + 1, (3, 2.0, (), (1.0,), "12", (-1, -2), (None,), [[1, 2]])
    for dims in no_dims:
        yield {"dims": dims}, ValueError, "dims must be ints of 0 or more"
    for each in (2, "yes", (True, True), (None,), (2,), (0.0,), ()):
        yield {"dims": (0,), "periods": each}, ValueError, "periods must be a bool, or one for each"
    yield {"dims": (more,)}, ValueError, "a grid of"
    yield {"dims": (more, 0)}, ValueError, "a grid of"
    yield {"dims": (0,) * 5}, ValueError, "5 axes"
    yield {"periods": True}, TypeError, "dims="
    yield {}, TypeError, "dims="


@EVERYWHERE
def test_bad_grids(node, everywhere):
    make_grid = lambda options: make(node, node.comm, **options)  # noqa: E731
    right = {"dims": (node.size,)}
    check_refusals(node.comm, make_grid, right, bad_grids(node.size), everywhere=everywhere)


@TWO
def test_arguments_that_differ(node):
    xp, n, last = node.xp, node.size, node.size - 1
    square, wide = xp.zeros((6, 6)), xp.zeros((6, 2, 3))
    row = {"dims": (n,)}
    for one, other, words in (
        ({"fields": xp.zeros(6, "f4")}, {"fields": xp.zeros(6, "i4")}, ("float32", "int32")),
        ({"fields": [xp.zeros(6)]}, {"fields": [xp.zeros(6), xp.zeros(6)]}, ("float64",)),
        ({"corners": True}, {"corners": False}, ("True", "False")),
        ({"fields": square, "axes": (0,)}, {"fields": square, "axes": (1,)}, ("0", "1")),
        (
            {"fields": wide, "axes": (0,)},
            {"fields": xp.zeros((6, 3, 2)), "axes": (0,)},
            ("2, 3", "3, 2"),
        ),
        ({"require": ("host", "fused", "copy")}, {"require": None}, ("None",)),
        (
            {"fields": square, "dims": (n, 1)},
            {"fields": square, "dims": (1, n)},
            (f"dims=[{n}, 1]", f"dims=[1, {n}]"),
        ),
        (
            {"fields": square, "dims": (n, 1), "periods": (True, False)},
            {"fields": square, "dims": (n, 1)},
            ("periods=[True, False]", "periods=[False, False]"),
        ),
    ):
        mine = row | (other if node.rank == last else one)
        error, told = attempt(node.comm, lambda mine=mine: make(node, node.comm, **mine))
        assert {text for text, _ in told} == {"MismatchError"}, (words, told)
        assert error.ranks == (tuple(range(last)) if node.rank == last else (last,))
        assert all(word in str(error) for word in words), (words, told)
    still_works(node)


@TWO
def test_faces_that_do_not_match(node):
    odd, options = node.size - 1, {"dims": (node.size, 1), "periods": (False, True)}
    fields = node.xp.zeros((5, 7 if node.rank == odd else 6))
    said = same_error(node.comm, lambda: ring(node, fields, ((1, 1), (0, 0)), **options))
    assert f"the faces of rank {odd - 1} and of its neighbor, rank {odd}, do not match" in said
    assert "they own 6 and 7 cells" in said or "they own 7 and 6 cells" in said
    # Without ghosts on that axis nothing travels, and nothing need match.
    with ring(node, fields, ((0, 0), (1, 1)), **options) as halo:
        halo.exchange(fields)


def test_what_is_no_cart_or_no_node(node, line):
    closed = Node(node.comm, backend=node.backend, timeout_s=40)
    closed.close()
    for cart, given, kinds, words in (
        *((cart, node, (TypeError, ValueError), "cart") for cart in (node.comm, None, 3)),
        (node, node, TypeError, "the communicator comes first"),
        *((line, wrong, TypeError, "node") for wrong in (node.comm, 3, "host")),
        (line, closed, ClosedError, "closed"),
    ):
        with pytest.raises(kinds, match=words):
            mpishare.HaloExchange(cart, node.xp.zeros(6), 1, node=given)
    still_works(node)


@TWO
def test_a_plan_meets_another(node, line):
    u = node.xp.zeros(6)
    make_mesh = lambda: mpishare.NeighborExchange(line, {}, {}, u, node=node)  # noqa: E731
    with pytest.raises(MismatchError):
        make(node, line) if node.rank else make_mesh()


@TWO
def test_a_node_that_was_made_without_ranks_of_this_machine(node, line):
    """Their cells would travel by messages, though they are at hand: refused on every rank."""
    half = node.comm.Split(node.rank % 2, node.rank)
    with mpishare.Node(half, timeout_s=40) as small:
        with pytest.raises(ValueError, match="the node= of rank 0 was made without rank") as caught:
            make(small, line)
        odd = ", ".join(map(str, range(1, node.size, 2)))
        assert f"{odd} of the same machine" in str(caught.value)
        make(small, half, dims=(half.size,)).close()  # all of its ranks are there
    make(node, line).close()
    half.Free()


def test_calls_with_fields_that_share_memory(node):
    """As at the plan's making: ghosts of both would be written; components of one array are apart.

    Also where each has been given before, beside another.
    """
    xp = node.xp
    one, other, long = xp.ones(6), xp.ones(6), xp.zeros(9)
    pair = xp.zeros((6, 2))
    with ring(node, (one, other)) as halo:
        for _ in range(3):
            halo.exchange(one, other)
            halo.exchange(other, one)
            halo.exchange(long[:6], one)
        for call in (halo.exchange, halo.start, halo.accumulate):
            for fields in ((one, one), (long[:6], long[3:])) * 2:
                with pytest.raises(ValueError, match="fields 0 and 1 share memory"):
                    call(*fields)
        halo.exchange(one, other)
    with ring(node, (pair[:, 0], pair[:, 1])) as halo:
        for step in range(3):
            pair[1:-1] = step + 10 * node.rank
            halo.exchange(pair[:, 0], pair[:, 1])
            assert (pair[0] == step + 10 * beside(node)[0]).all()
        with pytest.raises(ValueError, match="share memory"):
            halo.exchange(pair[:, 0], pair[:, 0])

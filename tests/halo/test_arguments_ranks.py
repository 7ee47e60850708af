"""Arguments that are wrong, on all ranks, on one alone, and those that differ."""

import numpy as np
import pytest

import mpishare
from mpishare import ClosedError, MismatchError, Node, PeerError
from tests.helpers.halos import (
    Case,
    Kind,
    arrays,
    attempt,
    check_refusal,
    even_case,
    exchange_step,
    make_fields,
    plan,
)

TWO = pytest.mark.ranks(min=2)


@pytest.fixture
def line(node):
    """A periodic cart of one axis."""
    cart = node.comm.Create_cart((node.size,), (True,))
    yield cart
    cart.Free()


def make(node, cart, shape=(6,), width=1, dtype="f8", **options):
    fields = options.pop("fields", None)
    if fields is None:
        fields = node.xp.zeros(shape, dtype)
    return mpishare.HaloExchange(cart, fields, width, node=node, **options)


def still_works(node):
    case = even_case((node.size,), True, 3)
    fields = make_fields(node, case, node.rank, [Kind()])
    with plan(node.comm, case, arrays(fields), node=node) as halo:
        exchange_step(halo, fields, 1)


BAD = {
    "negative": ({"width": -1}, ValueError, "width"),
    "float": ({"width": 1.0}, ValueError, "width"),
    "three": ({"width": (1, 2, 3)}, ValueError, "width"),
    "none": ({"width": None}, ValueError, "width"),
    "true": ({"width": True}, ValueError, "width"),
    "masked": ({"fields": "masked"}, TypeError, "field 0 is a masked array"),
    "no room": ({"width": 4}, ValueError, "ghosts"),
    "more axes": ({"shape": (6, 6)}, ValueError, "axes"),
    "axes that are none": ({"axes": (1,)}, ValueError, "axes"),
    "axes twice": ({"axes": (0, 0), "shape": (6, 6)}, ValueError, "axes"),
    "no fields": ({"fields": []}, ValueError, "field"),
    "numbers": ({"fields": 3.0}, TypeError, "array"),
    "nothing": ({"fields": [None]}, TypeError, "array"),
    "other cells": ({"fields": (6, 7)}, ValueError, "cells"),
    "one array twice": ({"fields": "twice"}, ValueError, "share memory"),
    "corners": ({"corners": "no"}, TypeError, "corners must be True or False, not 'no'"),
    "no route": ({"require": ()}, ValueError, "or is None for all"),
    "route": ({"require": ("nvlink",)}, ValueError, "require"),
}


def options_of(node, options):
    options = dict(options)
    if options.get("fields") == (6, 7):
        options["fields"] = [node.xp.zeros(n) for n in (6, 7)]
    elif options.get("fields") == "twice":
        options["fields"] = [node.xp.zeros(6)] * 2
    elif options.get("fields") == "masked":
        options["fields"] = np.ma.zeros(6)
    return options


@pytest.mark.parametrize("everywhere", [True, False], ids=["everywhere", "on one rank"])
def test_bad_arguments(node, line, everywhere):
    for options, kind, words in BAD.values():
        wrong = options_of(node, options)
        check_refusal(
            node.comm,
            lambda each: make(node, line, **each),
            wrong,
            {},
            kind,
            words,
            everywhere,
        )
    still_works(node)


HOST_BAD = {
    "objects": (lambda: np.zeros(6, object), TypeError, "objects"),
    "long elements": (lambda: np.zeros(6, "V17"), TypeError, "17 bytes"),
    "none at all": (lambda: np.zeros(6, "V0"), TypeError, "0 bytes"),
    "backwards": (lambda: np.zeros(6)[::-1], ValueError, "strides"),
    "repeated": (lambda: writable_broadcast(), ValueError, "strides"),
    "read-only": (lambda: np.broadcast_to(1.0, 6), ValueError, ""),
}


def writable_broadcast():
    return np.lib.stride_tricks.as_strided(np.zeros(1), (6,), (0,))


def test_arrays_that_will_not_do(host_node):
    node = host_node
    cart = node.comm.Create_cart((node.size,), (True,))
    for array, kind, words in HOST_BAD.values():
        for everywhere in (True, False):
            check_refusal(
                node.comm,
                lambda fields: make(node, cart, fields=fields),
                array(),
                None,
                kind,
                words,
                everywhere,
            )
    cart.Free()


@TWO
def test_arguments_that_differ(node, line):
    xp = node.xp
    pairs = {
        "dtype": ({"dtype": "f4"}, {"dtype": "i4"}, ("float32", "int32")),
        "count": ({"fields": [xp.zeros(6)]}, {"fields": [xp.zeros(6), xp.zeros(6)]}, ("float64",)),
        "corners": ({"corners": True}, {"corners": False}, ("True", "False")),
        "axes": (
            {"shape": (6, 6), "axes": (0,)},
            {"shape": (6, 6), "axes": (1,)},
            ("0", "1"),
        ),
        "other axes": (
            {"shape": (6, 2, 3), "axes": (0,)},
            {"shape": (6, 3, 2), "axes": (0,)},
            ("2, 3", "3, 2"),
        ),
        "require": ({"require": ("host", "fused", "copy")}, {"require": None}, ("None",)),
    }
    odd = node.size - 1
    for name, (one, other, words) in pairs.items():
        mine = other if node.rank == odd else one
        error, told = attempt(node.comm, lambda mine=mine: make(node, line, **mine))
        assert {text for text, _ in told} == {"MismatchError"}, (name, told)
        assert isinstance(error, ValueError)
        assert error.ranks == (tuple(range(odd)) if node.rank == odd else (odd,))
        assert all(word in str(error) for word in words), (name, told)
    still_works(node)


def test_a_halo_wider_than_the_neighbors_block(node):
    """The same ValueError on all ranks, also on those far away; it names both."""
    cells = (4,) * (node.size - 1) + (2,)
    widths = [((0, 0),)] * node.size
    asks = 0 if node.size > 1 else node.size - 1
    widths[asks] = ((3, 0),)  # the last rank stands on its low side
    case = Case((node.size,), (True,), (cells,), tuple(widths))
    fields = node.xp.zeros(cells[node.rank] + sum(widths[node.rank][0]))
    cart = node.comm.Create_cart(case.dims, case.periods)
    error, told = attempt(
        node.comm, lambda: mpishare.HaloExchange(cart, fields, widths[node.rank], node=node)
    )
    assert isinstance(error, ValueError), told
    assert len(set(told)) == 1
    assert f"rank {asks}" in str(error)
    assert f"rank {node.size - 1}" in str(error)
    cart.Free()
    still_works(node)


@TWO
def test_faces_that_do_not_match(node):
    cart = node.comm.Create_cart((node.size, 1), (False, True))
    odd = node.size - 1
    fields = node.xp.zeros((5, 7 if node.rank == odd else 6))
    error, told = attempt(
        node.comm, lambda: mpishare.HaloExchange(cart, fields, ((1, 1), (0, 0)), node=node)
    )
    assert isinstance(error, ValueError), told
    assert len(set(told)) == 1
    assert f"rank {odd - 1}" in str(error)
    assert f"rank {odd}" in str(error)
    # Without ghosts on that axis nothing travels, and nothing need match.
    halo = mpishare.HaloExchange(cart, fields, ((0, 0), (1, 1)), node=node)
    halo.exchange()
    halo.close()
    cart.Free()


def test_what_is_no_cart(node):
    for cart in (node.comm, None, 3, node):
        with pytest.raises((TypeError, ValueError), match="cart"):
            mpishare.HaloExchange(cart, node.xp.zeros(6), 1, node=node)
    still_works(node)


def test_what_is_no_node(node, line):
    for wrong in (node.comm, 3, "host"):
        error, told = attempt(
            node.comm,
            lambda wrong=wrong: mpishare.HaloExchange(line, node.xp.zeros(6), 1, node=wrong),
        )
        assert isinstance(error, TypeError), told
        assert "node" in str(error)
    still_works(node)


def test_a_node_that_is_closed(node, line):
    other = Node(node.comm, backend=node.backend, timeout_s=40)
    other.close()
    error, told = attempt(
        node.comm, lambda: mpishare.HaloExchange(line, node.xp.zeros(6), 1, node=other)
    )
    assert isinstance(error, ClosedError), told
    still_works(node)


@TWO
def test_a_plan_meets_another(node, line):
    """Ranks that make different plans, or a plan and something else, are told."""
    error, told = attempt(
        node.comm,
        lambda: (
            make(node, line)
            if node.rank
            else mpishare.NeighborExchange(line, {}, {}, node.xp.zeros(6), node=node)
        ),
    )
    assert isinstance(error, MismatchError), told


@TWO
def test_a_rank_that_raises_in_the_middle(node):
    """The others are told, with its words; nobody waits for the deadline."""
    case = even_case((node.size,), True, 3)
    fields = make_fields(node, case, node.rank, [Kind()])
    cart = node.comm.Create_cart(case.dims, case.periods)
    with Node(node.comm, backend=node.backend, timeout_s=40) as other:
        halo = mpishare.HaloExchange(cart, arrays(fields), 1, node=other)
        halo.exchange()
        error, told = attempt(node.comm, lambda: leave_or_go_on(other, halo))
    if node.rank == 0:
        assert isinstance(error, ZeroDivisionError)
    elif node.rank in (1, node.size - 1):  # its neighbors
        assert isinstance(error, PeerError), told
        assert "ZeroDivisionError: in the middle" in str(error.failures)
    cart.Free()


def leave_or_go_on(node, halo):
    with node:
        if node.rank == 0:
            raise ZeroDivisionError("in the middle")
        for _ in range(5):
            halo.exchange()
            node.synchronize()
    return node


@TWO
def test_a_node_that_was_made_without_ranks_of_this_machine(node):
    """Their cells would travel by messages, though they are at hand: refused on every rank."""
    half = node.comm.Split(node.rank % 2, node.rank)
    cart = node.comm.Create_cart((node.size,), (True,))
    with mpishare.Node(half, timeout_s=40) as small:
        with pytest.raises(ValueError, match="the node= of rank 0 was made without rank") as caught:
            make(small, cart)
        odd = ", ".join(map(str, range(1, node.size, 2)))
        assert f"{odd} of the same machine" in str(caught.value)
        own = half.Create_cart((half.size,), (True,))
        make(small, own).close()  # all of its ranks are there
        own.Free()
    make(node, cart).close()
    cart.Free()
    half.Free()


def test_calls_with_fields_that_share_memory(node, line):
    """As at the plan's making: ghosts of both would be written; components of one array are apart.

    Also where each has been given before, beside another.
    """
    xp = node.xp
    one, other, long = xp.ones(6), xp.ones(6), xp.zeros(9)
    pair = xp.zeros((6, 2))
    with mpishare.HaloExchange(line, (one, other), 1, node=node) as halo:
        for _ in range(3):
            halo.exchange(one, other)
            halo.exchange(other, one)
            halo.exchange(long[:6], one)
        for call in (halo.exchange, halo.start, halo.accumulate):
            for fields in ((one, one), (long[:6], long[3:])) * 2:
                with pytest.raises(ValueError, match="fields 0 and 1 share memory"):
                    call(*fields)
        halo.exchange(one, other)
    with mpishare.HaloExchange(line, (pair[:, 0], pair[:, 1]), 1, node=node) as halo:
        for step in range(3):
            pair[1:-1] = step + 10 * node.rank
            halo.exchange(pair[:, 0], pair[:, 1])
            left = step + 10 * ((node.rank - 1) % node.size)
            assert (pair[0] == left).all()
        with pytest.raises(ValueError, match="share memory"):
            halo.exchange(pair[:, 0], pair[:, 0])

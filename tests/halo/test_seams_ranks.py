"""Seams: random lists beside cells found one by one, bits of factors, and errors on all ranks."""

import numpy as np
import pytest

import mpishare
from mpishare import PeerError, Seam, SeamExchange
from tests.helpers.halos import on_host, some
from tests.helpers.seams import DTYPES, HOST_DTYPES, check_list


@pytest.mark.parametrize("part", range(4))
def test_random_lists(node, every_route, part):
    dtypes = HOST_DTYPES if node.backend == "host" else DTYPES
    for seed in range(8 * part, 8 * part + some(node, 8)):
        check_list(node, node.comm, seed, dtypes)


def test_random_lists_of_larger_boxes(node, every_route):
    """Of parts in chunks, which are transposed in tiles on GPUs."""
    for seed in range(100, 100 + some(node, 6)):
        check_list(node, node.comm, seed, ("f8", "c16", "f4"), most=70)


def test_products_and_sums_are_each_rounded(node, every_route):
    """An fma would give other bits, and so would a real factor taken for a complex one."""
    rng = np.random.default_rng(node.rank)
    peer = (node.rank + 1) % node.size
    seams = [
        Seam((0, np.s_[:64]), (peer, 0, np.s_[64:]), scale=0.1, offset=0.7),
        Seam((1, np.s_[:64]), (peer, 1, np.s_[64:]), scale=0.3 + 0.7j, offset=0.1j),
        Seam((2, np.s_[:64]), (peer, 2, np.s_[64:]), scale=-1.0),
    ]
    mine = [rng.standard_normal(128), *(rng.standard_normal((128, 2)).view("c16")[:, 0],) * 2]
    mine[2] = np.where(np.arange(128) % 3, mine[2], complex(np.inf, 1))
    fields = [node.xp.asarray(each) for each in mine]
    others = node.comm.allgather(mine)[peer]
    with SeamExchange(node.comm, fields, seams, node=node) as plan:
        plan.exchange(*fields)
        real, pairs, signs = (on_host(each)[:64] for each in fields)
        assert (real == others[0][64:] * 0.1 + 0.7).all()
        there = others[1][64:]
        assert (pairs.real == there.real * 0.3 - there.imag * 0.7 + 0.0).all()
        assert (pairs.imag == there.real * 0.7 + there.imag * 0.3 + 0.1).all()
        assert (signs == -others[2][64:]).all()


@pytest.mark.parametrize("given", [{"offset": 5.0}, {"scale": 2.0}, {}])
def test_large_boxes_of_private_arrays(node, every_route, given):
    """That are read out of the memory of another process, if their cells only move."""
    n = 100_000
    u = node.xp.arange(2.0 * n) + node.rank
    peer = (node.rank + 1) % node.size
    with SeamExchange(
        node.comm, u, [Seam((0, np.s_[:n]), (peer, 0, np.s_[n:]), **given)], node=node
    ) as plan:
        plan.exchange(u)
        right = (np.arange(n, 2.0 * n) + peer) * given.get("scale", 1) + given.get("offset", 0)
        assert (on_host(u)[:n] == right).all()
        u[:] = 1
        plan.accumulate(u)
        assert (on_host(u) == np.repeat([0, 1 + given.get("scale", 1)], n)).all()


def test_sums_are_in_the_order_of_the_readers(node, route):
    """Of numbers whose sums depend on it, added to one cell by all ranks."""
    sizes = [1e16, 1.0, -1e16, 3.0]
    u = node.xp.zeros(3)
    u[:2] = node.xp.asarray([sizes[node.rank % 4], sizes[(node.rank + 1) % 4]])
    seams = [Seam((0, np.s_[k : k + 1]), (0, 0, np.s_[2:])) for k in range(2)]
    with SeamExchange(node.comm, u, seams, node=node) as plan:
        plan.accumulate(u)
    total = 0.0
    for rank in range(node.size):
        for k in range(2):
            total += sizes[(rank + k) % 4]
    assert on_host(u).tolist() == [0, 0, total if node.rank == 0 else 0]


U = np.s_[:2, :]
WRONG = {
    "write the same cells": [Seam((0, U), (0, 0, np.s_[2:4, :])), Seam((0, U), (0, 0, U))],
    "in which seam 0 of rank 0": [
        Seam((0, U), (0, 0, np.s_[2:4, :])),
        Seam((0, np.s_[4:, :]), (0, 0, U)),
    ],
    "nothing is clipped": [Seam((0, U), (0, 0, np.s_[5:7, :]))],
    "it wants": [Seam((0, U), (0, 0, np.s_[2:4, :]), axes=(1, 0))],
    "names rank 99": [Seam((0, U), (99, 0, U))],
    "names field 7 of rank 0": [Seam((0, U), (0, 7, U))],
    "ring of no cells": [Seam((0, U), [(0, 0, np.s_[3:3, :])], along=0)],
}


@pytest.mark.parametrize("why", WRONG)
def test_what_all_ranks_see_is_an_error_on_all(node, why):
    u = node.xp.zeros((6, 5))
    with pytest.raises(ValueError, match=why) as error:
        SeamExchange(node.comm, u, WRONG[why] * (node.rank == 0), node=node)
    assert "seam" in str(error.value)
    assert "of rank 0" in str(error.value)
    with SeamExchange(node.comm, u, [Seam((0, U), (0, 0, np.s_[2:4, :]))], node=node) as plan:
        plan.exchange(u)  # the job goes on


ALONE = [
    (Seam((1, U), (0, 0, U)), "into names field 1"),
    (Seam((0, np.s_[:7, :]), (0, 0, U)), "nothing is clipped"),
    (Seam((0, np.s_[::2, :]), (0, 0, U)), "slices of step 1"),
    (Seam((0, np.s_[0, :]), (0, 0, U)), "slices of step 1"),
    (Seam((0, np.s_[:, :, :]), (0, 0, U)), "3 slices"),
    (Seam((0, np.s_[0.0:2.0]), (0, 0, U)), "slices of step 1 between ints"),
    (Seam((0, (np.arange(2), np.s_[:])), (0, 0, U)), "slices of step 1 between ints"),
    (Seam((0, U), (0, 0, U), axes=(0, 0)), "axes names an axis twice"),
    (Seam((0, U), (0, 0, U), axes=(1,)), "axes must name each"),
    (Seam((0, U), (0, 0, U), axes=1), "axes must be ints that name axes"),
    (Seam((0, U), (0, 0, U), flip=None), "flip must be ints that name axes"),
    (Seam((0, U), (0, 0, U), flip=(0, -2)), "flip names an axis twice"),
    (Seam((0, U), (0, 0, U), flip=(2,)), "flip names axis 2"),
    (Seam((0, U), (0, 0, U), scale=1j), "scale 1j is not for elements of float64"),
    (Seam((0, U), (0, 0, U), scale=None), "scale None is not for elements of float64"),
    (Seam((0, U), (0, 0, U), scale=[2.0, 3.0]), r"scale \[2.0, 3.0\] is not for elements"),
    (Seam((0, U), (0, 0, U), offset=np.ones(2)), "is not for elements of float64"),
    (Seam((0, U), [(0, 0, U)], along=0, start=np.arange(2)), "start must be an int"),
    (Seam((0, U), [(0, 0, U)]), "along= make a ring"),
    (Seam((0, U), (0, 0, U), shift="a"), "are of a ring"),
    (Seam((0, U), (0, U)), "source must be a rank"),
    ("seam", "must be a Seam"),
]


@pytest.mark.parametrize(("seam", "why"), ALONE, ids=[why for _, why in ALONE])
def test_what_is_wrong_by_itself_is_an_error_where_it_is_listed(node, seam, why):
    u = node.xp.zeros((6, 5))
    kind = (TypeError, ValueError) if node.rank == 0 else PeerError
    with pytest.raises(kind, match=f"seam 0 of rank 0: .*{why}"):
        SeamExchange(node.comm, u, [seam] * (node.rank == 0), node=node)
    with SeamExchange(node.comm, u, [Seam((0, U), (0, 0, np.s_[2:4]))], node=node) as plan:
        plan.exchange(u)  # the job goes on


ONE = (0, np.s_[:1])
OF_DTYPES = [
    *(
        (dtype, [Seam(ONE, (0, 0, np.s_[1:2]), **given)], "is not for elements")
        for dtype, given in (
            ("i4", {"scale": 2}),
            ("i4", {"offset": 2**40}),
            ("i4", {"offset": float("nan")}),
            ("i4", {"offset": float("inf")}),
            ("u1", {"scale": -1}),
            ("u1", {"offset": -5}),
            ("?", {"offset": 1}),
        )
    ),
    ("f8", [Seam(ONE, (0, 1, np.s_[1:2]))], "both have one dtype"),
    ("f8", Seam(ONE, (0, 0, np.s_[1:2])), "seams must be a list of Seam"),
]


@pytest.mark.parametrize(("dtype", "seams", "why"), OF_DTYPES)
def test_what_a_dtype_does_not_take(node, dtype, seams, why):
    fields = [node.xp.zeros(4, dtype), node.xp.zeros(4, "f4")]
    with pytest.raises((TypeError, ValueError), match=why):
        SeamExchange(node.comm, fields, seams, node=node)


def test_names_of_shifts_are_all_given(node):
    u = node.xp.arange(6.0)
    ring = Seam((0, np.s_[:1]), [(0, 0, np.s_[1:])], along=0, shift="low")
    with SeamExchange(node.comm, u, [ring] * (node.rank == 0), node=node) as plan:
        for shift in (None, {}, {"high": 1}, {"low": 1, "high": 1}):
            with pytest.raises(ValueError, match="shift= names"):
                plan.exchange(u, shift=shift)
        for shift in (0, [("low", 1)], "low"):
            with pytest.raises(TypeError, match="exchange failed: shift= must be a dict"):
                plan.exchange(u, shift=shift)
        for value in (1.5, "1", None):
            with pytest.raises(TypeError, match=r"shift\['low'\] must be an int"):
                plan.exchange(u, shift={"low": value})
        plan.exchange(u, shift={"low": np.int64(-1)})
        assert float(u[0]) == (5 if node.rank == 0 else 0)
    with pytest.raises(mpishare.ClosedError):
        plan.exchange(u, shift={"low": 1})

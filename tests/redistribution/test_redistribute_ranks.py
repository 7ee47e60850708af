"""Redistributions against NumPy: any distributions, arrays and routes, and what is refused."""

import numpy as np
import pytest

from mpishare import (
    Box,
    ClosedError,
    EpochError,
    MismatchError,
    OnRank,
    PeerError,
    Redistribute,
    UnsupportedError,
)
from tests.helpers.distributions import check_case
from tests.helpers.halos import on_host

TWO = pytest.mark.ranks(min=2)
SEEDS = range(25)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_distributions(node, seed):
    check_case(node, node.comm, seed).close()


@pytest.mark.parametrize("seed", SEEDS[:12])
def test_random_distributions_in_numpy(python_node, seed):
    check_case(python_node, python_node.comm, seed).close()


@pytest.mark.parametrize("seed", SEEDS[:12])
def test_random_distributions_by_messages(node, seed, monkeypatch):
    monkeypatch.setenv("MPISHARE_ROUTE", "mpi")
    plan = check_case(node, node.comm, seed)
    assert {*plan.routes.values()} <= {"mpi", "mpi-gpu"}
    plan.close()


def parts(node, n=8):
    """The rows of a matrix on this rank, and its columns."""
    whole = np.arange(float(n * n)).reshape(n, n)
    of = np.array_split(np.arange(n), node.size)[node.rank]
    return node.xp.asarray(whole[of]), whole[:, of], whole


@TWO
@pytest.mark.parametrize("permute", [None, (1, -1, 0)])
def test_long_runs_of_private_arrays_are_read_where_they_are(compiled_node, permute):
    """Each of them from the process of its owner, without staging; permuted ones are packed."""
    node = compiled_node
    shape = 4 * node.size, node.size, 10_000
    with Redistribute(node.comm, shape, 0, 1, node=node, permute=permute) as plan:
        # A part has 320 kB, and has it twice where it is packed.
        assert (plan.staging_nbytes < 1 << 20) == (permute is None)
        for step in range(4):
            whole = np.arange(np.prod(shape), dtype=float).reshape(shape) + step
            b = plan.forward(whole[plan.source_box.slices].copy())
            right = whole[plan.target_box.slices].transpose(permute or (0, 1, 2))
            assert (b == right).all()
            assert (plan.backward(b) == whole[plan.source_box.slices]).all()


def test_out_shares_no_memory_unless_that_is_asked_for(node):
    n = 2 * node.size
    with Redistribute(node.comm, (n, n), 0, 1, int, permute=(1, 0), node=node) as plan:
        a = node.xp.zeros((4, n), int)
        for array, out in ((a[:2], a[:2]), (a[:2], a[1:3]), (a[:2], a[2:0:-1])):
            with pytest.raises(ValueError, match=r"out shares memory with the array: .*in_place"):
                plan.forward(array, out=out)


@pytest.mark.parametrize("moved", [0, 1])
def test_in_place_takes_any_array_on_the_same_memory(node, moved):
    """Another view of the whole, as a reshaped one, or of a part."""
    n = 2 * node.size
    whole = np.arange(n * n).reshape(n, n)
    with Redistribute(
        node.comm, (n, n), 0, 1, int, permute=(1, 0), in_place=True, node=node
    ) as plan:
        memory = node.xp.zeros((2 + moved, n), int)
        a, b = memory[:2], memory[moved:].reshape(plan.target_shape)
        for _ in range(2):
            a[...] = node.xp.asarray(whole[plan.source_box.slices])
            assert plan.forward(a, out=b) is b
            assert (on_host(b) == whole[plan.target_box.slices].T).all()
        plan.start(b, a, backward=True)
        assert plan.wait() is a
        assert (on_host(a) == whole[plan.source_box.slices]).all()


def test_an_out_that_cannot_be_stored_into(host_node):
    """Nothing was exchanged then: the plan goes on, also with an array that is read-only."""
    rows, columns, whole = parts(host_node)
    with Redistribute(host_node.comm, whole.shape, 0, 1, in_place=True, node=host_node) as plan:
        fixed = np.zeros(plan.target_shape)
        fixed.flags.writeable = False
        for out, why in (
            (fixed, "read-only"),
            (np.broadcast_to(np.zeros(1), plan.target_shape), "strides"),
        ):
            with pytest.raises(ValueError, match=f"forward failed: out .*{why}"):
                plan.forward(rows, out=out)
        if rows.shape == columns.shape:
            rows.flags.writeable = False
            with pytest.raises(ValueError, match="out is read-only"):
                plan.forward(rows, out=rows)
        assert (plan.forward(rows) == columns).all()


def test_the_same_distribution_in_other_words(node):
    """Each rank may spell it as it likes."""
    rank, numbers = node.rank, np.int64
    for source in ([0, numbers(0)][rank % 2], [-2, 0][rank % 2]):
        target = [[1, node.size], np.array([1, node.size])][rank % 2]
        shape = [(8, 8), np.array([8, 8])][rank % 2]
        Redistribute(node.comm, shape, source, target, node=node).close()


def test_calls_out_of_turn(node):
    rows, columns, whole = parts(node)
    plan = Redistribute(node.comm, whole.shape, 0, 1, node=node)
    with pytest.raises(EpochError, match="nothing was started"):
        plan.wait()
    plan.start(rows)
    for call in (plan.start, plan.forward, plan.backward):
        with pytest.raises(EpochError, match="redistribution is open"):
            call(rows)
    assert (on_host(plan.wait()) == columns).all()
    plan.start(rows)
    with pytest.warns(ResourceWarning, match=plan.name):
        plan.close()  # completes it
    with pytest.raises(
        ClosedError, match=r"Redistribute [0-9]+: forward failed: the plan is closed"
    ):
        plan.forward(rows)
    assert "closed" in repr(plan)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"source": 2}, "source cuts axis 2: the array has 2 axes"),
        ({"target": 1.5}, "target must be an axis"),
        ({"target": (1, 0)}, "number of ranks along each of 2 axes"),
        ({"source": OnRank(99)}, "ranks are 0 to"),
        ({"source": Box((0, 0), (9, 8))}, "not within an array of shape"),
        ({"source": Box((0,), (8,))}, "not within an array of shape"),
        ({"source": Box((0, 0.5), (8, 8))}, "its ends are ints"),
        ({"permute": (0, 0)}, "permute names an axis twice"),
        ({"permute": (0,)}, "permute must name each of 2 axes once"),
        ({"permute": (-3, 1)}, "permute names axis -3, and there are 2"),
        ({"shape": ()}, "shape has no axes"),
        ({"shape": -1}, "shape must be"),
        ({"dtype": None}, "dtype is None, and a Redistribute is for one dtype: name it"),
        ({"dtype": object}, "^Redistribute failed: dtype holds Python objects"),
        ({"dtype": "V0"}, "^Redistribute failed: dtype has elements of dtype .*no bytes"),
        ({"dtype": "float33"}, "dtype must be one of NumPy, such as .f4.*not .float33"),
        ({"dtype": "(2,)f4"}, "arrays themselves"),
        ({"shape": (2**70, 4)}, "too large"),
        ({"permute": (True, False)}, "permute must be ints that name axes"),
        ({"in_place": "no"}, "in_place must be True or False, not 'no'"),
        ({"source": Box((0, 0), (0, 0))}, "wants .*which no rank has"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named_on_every_rank(node, words, message):
    given = {"shape": (8, 8), "source": 0, "target": 1, **words}
    with pytest.raises((TypeError, ValueError), match=message):
        Redistribute(node.comm, node=node, **given)


@TWO
def test_cells_with_two_sources_or_none(node):
    with pytest.raises(ValueError, match=r"ranks 0 and 1 both have .*a cell has one source"):
        Redistribute(node.comm, (8, 8), None, 1, node=node)
    first = Box((0, 0), (8, 8)) if node.rank == 0 else Box((8, 8), (8, 8))
    lacking = Box((0, 0), (8, 3)) if node.rank == 0 else Box((0, 0), (0, 0))
    with pytest.raises(ValueError, match=r"rank 0 wants Box\(.*3.*8, 8\)\), which no rank has"):
        Redistribute(node.comm, (8, 8), lacking, first, node=node)


@TWO
def test_one_rank_is_wrong(node):
    axis = 7 if node.rank == 1 else 1
    with pytest.raises(PeerError if node.rank != 1 else ValueError):
        Redistribute(node.comm, (8, 8), 0, axis, node=node)
    with pytest.raises(MismatchError, match="target"):
        Redistribute(node.comm, (8, 8), 0, int(node.rank == 1), node=node)


def test_arrays_that_are_not_this_ranks_part(node):
    rows, columns, whole = parts(node)
    with Redistribute(node.comm, whole.shape, 0, 1, node=node) as plan:
        for wrong, why in (
            (rows[:-1], "shape"),
            (rows.astype("f4"), "dtype"),
            (rows.ravel(), "shape"),
        ):
            with pytest.raises(ValueError, match=f"forward failed: the array .*source: {why}"):
                plan.forward(wrong)
        with pytest.raises(ValueError, match="out is not this rank's part of the target"):
            plan.forward(rows, out=rows[:, :0])
        with pytest.raises(TypeError, match="forward failed"):
            plan.forward([1.0])
        with pytest.raises(TypeError, match=r"the array is None: .*the source, of shape \("):
            plan.forward(None)
        assert (on_host(plan.forward(rows)) == columns).all()


def test_routes_that_are_refused(node):
    """Ranks that are reached alike are named together, with the reason."""
    each = r"\w+ among ranks? [0-9, ]+( \([^)]*\))?"
    why = rf"refuses {each}(, {each})*\. Name their routes in require="
    with pytest.raises(UnsupportedError, match=why) as refused:
        Redistribute(node.comm, (8, 8), 0, 1, node=node, require="mpi-gpu")
    if node.backend == "host":
        assert "(the fields are in host memory)" in str(refused.value)

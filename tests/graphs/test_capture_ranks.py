"""mpishare.capture on either backend: values, loops, arguments, results, closing."""

import functools
import gc
import pickle
import weakref

import numpy as np
import pytest
from mpi4py import MPI

import mpishare
from mpishare import ClosedError, UnsupportedError
from tests.helpers import rings
from tests.helpers.captures import skip_where_ranks_take_turns, skip_without_graphs
from tests.helpers.reductions import on_host

CELLS = 6


class Ring:
    """A field of one axis on a periodic ring, and what its cells must be after some steps."""

    def __init__(self, node):
        self.node, self.xp = node, node.xp
        n = CELLS * node.size
        self.first = np.sin(np.arange(n)) + np.arange(n) % 3
        self.mine = slice(CELLS * node.rank, CELLS * (node.rank + 1))
        self.u, self.v = (self.xp.zeros(CELLS + 2) for _ in range(2))
        self.u[1:-1] = self.xp.asarray(self.first[self.mine])
        self.halo = rings.ring(node, self.u)

    def advance(self, u, v):
        self.halo.exchange(u)
        self.xp.add(u[:-2], u[2:], out=v[1:-1])
        v[1:-1] *= 0.25
        v[1:-1] += u[1:-1] * 0.5  # allocates

    def after(self, steps):
        whole = self.first
        for _ in range(steps):
            whole = (np.roll(whole, 1) + np.roll(whole, -1)) * 0.25 + whole * 0.5
        return whole[self.mine]

    def check(self, u, steps):
        assert np.allclose(on_host(u[1:-1]), self.after(steps), rtol=1e-10)


@pytest.fixture
def ring(node):
    ring = Ring(node)
    if node.backend == "cuda":
        skip_without_graphs(ring.halo)
    return ring


@pytest.mark.parametrize("plainly", [None, 3])
def test_the_fields_of_a_step_are_swapped(ring, plainly):
    """Two arrangements of the same arrays; beside plain calls, too."""
    u, v = ring.u, ring.v
    with mpishare.capture(ring.node, ring.advance) as step:
        for number in range(100):
            assert (ring.advance if number % 7 == plainly else step)(u, v) is None
            u, v = v, u
    ring.check(u, 100)


def test_new_arrays_at_every_call(ring):
    step = mpishare.capture(ring.node, ring.advance)
    u, held = ring.u, []
    for _ in range(30):
        v = ring.xp.zeros(CELLS + 2)
        step(u, v)
        held = [*held[-3:], u]  # so that addresses come again, but not at once
        u = v
    ring.check(u, 30)


def test_what_a_step_returns(node):
    """The arrays of the function, in any container; for other results no replay could answer."""
    xp = node.xp
    x = xp.arange(4.0)
    step = mpishare.capture(node, lambda x: {"twice": 2 * x, "rest": (x + 1, [None])})
    for number in range(5):
        x.fill(number)
        found = step(x)
        assert on_host(found["twice"]).tolist() == [2 * number] * 4
        assert on_host(found["rest"][0]).tolist() == [number + 1] * 4
        assert found["rest"][1] == [None]
    for wrong in (3, "text", [x, 2.0], {"a": {1}}):
        with pytest.raises(TypeError, match=r"the function returned .*, which no replay"):
            mpishare.capture(node, lambda _, wrong=wrong: wrong)(x)


def test_numbers_and_lists_are_arguments(node):
    """Another number is another graph."""
    xp = node.xp
    x, y = xp.ones(3), xp.ones(3)

    def add(arrays, by, *, sign):
        for each in arrays:
            each += sign * by

    step = mpishare.capture(node, functools.partial(add, sign=-1))
    for _ in range(4):
        step([x, y], 1)
        step((x, y), 2.0)
    assert on_host(x).tolist() == on_host(y).tolist() == [1 - 4 * 3] * 3
    assert "capture(add)" in repr(step)


def test_a_loop_until_it_is_done(ring):
    """Smoothed until the change is small; on all ranks in the same iteration."""
    xp = ring.xp
    left = xp.full(1, 25, np.int64)

    def twice(u, v, left):
        ring.advance(u, v)
        ring.advance(v, u)
        left -= 1

    solve = mpishare.capture(ring.node, twice, until=lambda u, v, left: left <= 0, at_most=1000)
    count = 0
    for wanted in (25, 1, 7, 40):
        left.fill(wanted)
        assert solve(ring.u, ring.v, left) is None
        count += 2 * wanted
        assert int(solve.iterations[0]) == wanted
        ring.check(ring.u, count)


def test_a_loop_that_a_reduction_ends(ring):
    """Every rank leaves it in the iteration in which the sum over all ranks is small."""
    node, xp = ring.node, ring.xp
    skip_where_ranks_take_turns(node)
    mine, total = xp.zeros(1), xp.zeros(1)
    with mpishare.Allreduce(node.comm, total, node=node) as allreduce:

        def halve(mine, total):
            xp.multiply(mine, 0.5, out=mine)
            total[...] = mine
            allreduce.reduce(total)

        solve = mpishare.capture(node, halve, until=lambda mine, total: total < 1e-3, at_most=1000)
        for largest in (1.0, 3.0, 1e6):
            mine.fill(largest / (1 + node.rank))
            solve(mine, total)
            whole, count = sum(largest / (1 + rank) for rank in range(node.size)), 0
            while whole >= 1e-3:
                whole, count = whole / 2, count + 1
            assert int(solve.iterations[0]) == count
            assert np.isclose(float(total[0]), whole)


@pytest.mark.parametrize(
    "answer",
    [
        lambda xp: xp.zeros(2, bool),
        lambda xp: xp.zeros(1),
        lambda _: None,
        lambda _: True,
        lambda _: 0.0,
        lambda _: np.zeros(1),
    ],
)
def test_until_must_answer_with_one_element(node, answer):
    xp = node.xp
    solve = mpishare.capture(node, lambda x: None, until=lambda x: answer(xp), at_most=3)
    with pytest.raises(
        TypeError, match=r"until returned .*, not an array of one boolean or integer"
    ):
        solve(xp.zeros(1))


def test_numbers_of_the_library_are_results(node):
    """`u.sum()` is an array of CuPy and a scalar of NumPy: the same program is right with both."""
    step = mpishare.capture(node, lambda u: u.sum())
    loop = mpishare.capture(node, lambda u: u.sum(), until=lambda u: u[0] < 2, at_most=3)
    for call in (step, step, step, loop):
        assert float(call(node.xp.ones(3))) == 3


def test_wrong_arguments(node):
    for function, options, kind, text in (
        (3, {}, TypeError, "cannot be called"),
        (print, {"until": print}, TypeError, "go together"),
        (print, {"at_most": 3}, TypeError, "go together"),
        (print, {"until": 7, "at_most": 3}, TypeError, "until=7 cannot be called"),
        (print, {"until": print, "at_most": 0}, ValueError, "at_most=0"),
        (print, {"until": print, "at_most": 1e4}, TypeError, r"must be an int, not 10000\.0"),
    ):
        with pytest.raises(kind, match=text):
            mpishare.capture(node, function, **options)
    with pytest.raises(TypeError, match=r"capture failed: node must be an mpishare\.Node, not 3"):
        mpishare.capture(3, print)
    with pytest.raises(TypeError):
        pickle.dumps(mpishare.capture(node, print))


def test_what_a_step_needs_is_closed(ring):
    step = mpishare.capture(ring.node, ring.advance)
    for _ in range(3):
        step(ring.u, ring.v)
    step.close()
    step.close()
    assert step.is_closed
    with pytest.raises(ClosedError, match=r"capture\(advance\) is closed"):
        step(ring.u, ring.v)
    # And one whose plan is closed: a replay would use memory that is gone.
    step = mpishare.capture(ring.node, ring.advance)
    for _ in range(3):
        step(ring.u, ring.v)
    ring.halo.close()
    with pytest.raises(ClosedError, match="HaloExchange"):
        step(ring.u, ring.v)


def test_a_dropped_step_is_closed_with_what_it_held_at_the_next_calls():
    """Each rank closes it by itself: here one rank has one, and the plans of all are dropped."""
    with mpishare.Node(MPI.COMM_WORLD) as node:
        x = node.xp.zeros(2)
        plan = mpishare.Allreduce(node.comm, x, node=node)
        gone = weakref.ref(plan)
        if node.rank == 0:
            step = mpishare.capture(node, plan.reduce)
            del step
        del plan
        for _ in range(3):
            gc.collect()
            node.event().close()
        assert gone() is None


def test_a_step_in_a_step(ring):
    """The inner one becomes a part of the outer one's graph."""
    inner = mpishare.capture(ring.node, ring.advance)

    def two(u, v):
        inner(u, v)
        inner(v, u)

    outer = mpishare.capture(ring.node, two)
    for _ in range(20):
        outer(ring.u, ring.v)
    ring.check(ring.u, 40)


def test_a_window_is_an_argument(node):
    with node.allocate_each(3, fill=0) as window:
        step = mpishare.capture(node, lambda w: w.array.fill(float(node.rank)))
        for _ in range(3):
            window.array.fill(-1)
            step(window)
            assert on_host(window.array).tolist() == [node.rank] * 3


def test_only_the_host_runs_collective_calls_in_it(node):
    """A replay would not make them; the host backend replays nothing."""

    def barrier(x):
        node.barrier()
        x.fill(1)

    step = mpishare.capture(node, barrier)
    x = node.xp.zeros(2)
    step(x)
    if node.backend == "cuda":
        with pytest.raises(UnsupportedError, match=r"Node.barrier failed inside capture\(barrier"):
            step(x)
    else:
        step(x)
    node.barrier()

"""Dropped objects when something goes wrong, or ends, before they are closed."""

import os

import numpy as np
import pytest

import mpishare
from tests.helpers.scenes import BACKENDS, play
from tests.helpers.scenes_halo import play_on
from tests.helpers.stage import Stage


def dropped(stage: Stage, how: str) -> None:
    stage.quiet()
    node = stage.node()
    halo = stage.make("plan", node)
    window, event, channel, pool = node.allocate(4), node.event(), node.channel(4), node.pool()
    halo.exchange(node.xp.zeros(4))
    node.synchronize()
    if how == "by some" and stage.rank == 0:
        held = halo, window
    del halo, window, event, channel, pool
    if how == "fork":
        node.collect()
        window = node.allocate(4)
        child = os.fork()
        if not child:
            del window  # a finalizer of the child's own copy
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        window.fence()
        assert not window.is_closed
    if how == "finalized":
        from mpi4py import MPI

        MPI.Finalize()
    if how == "by some" and stage.rank == 0:
        assert not any(each.is_closed for each in held)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["by all", "by some", "fork", "finalized"])
def test_a_program_that_ends_after_it_dropped_objects(how, backend):
    """It ends with status 0, and says nothing."""
    # From Python 3.12 on a fork beside threads, which the watchdog is, is warned of.
    quiet = ("-W", "ignore::DeprecationWarning")
    python = quiet if how == "fork" else ()
    play(2, dropped, how, backend=backend, python=python).ended_well()


def ends_early(stage: Stage) -> None:
    """Rank 0 ends at once behind its last fence, half a second before its stream gets there."""
    from tests.helpers.counted import Counted

    node = stage.node()
    window, counted = node.allocate(1, fill=0.0), Counted("")
    window.fence()
    node.synchronize()
    node.barrier()
    if stage.rank == 0:
        counted.idle(500_000)
        window.array[0] = 7.0
    window.fence()
    if stage.rank == 1:
        node.synchronize()
        assert float(window.array[0]) == 7.0


@pytest.mark.gpu
def test_a_program_that_ends_before_its_stream_does():
    """The others get what it wrote before its fence."""
    play(2, ends_early, backend="cuda").ended_well()


def fails_on_one(stage: Stage) -> None:
    from mpishare.plans.node_cache import context_of

    node = stage.node()
    window = node.allocate(4)
    name = window.name
    del window

    def counted() -> int:
        return [child.name for child in context_of(node).children].count(name)

    shape = 4 if stage.rank else "four"
    stage.fails_on(0, TypeError, lambda: node.allocate(shape))
    assert counted() == 1
    node.collect()
    assert counted() == 0
    node.close()


def test_what_is_dropped_survives_an_error_in_the_call_that_tells():
    play(2, fails_on_one, shared=True).ended_well()


def across_nodes(stage: Stage, is_given: bool) -> None:
    from tests.helpers.held import open_files

    stage.quiet()
    counts = []
    node = stage.node() if is_given else None
    left = (stage.rank - 1) % stage.size
    for _ in range(8):
        cart = stage.world.Create_cart((stage.size,), (True,))
        u = np.full(6, float(stage.rank))
        halo = mpishare.HaloExchange(cart, u, 1, node=node)
        halo.exchange(u)
        assert u[0] == left
        del halo
        cart.Free()
        counts.append(len(open_files()))
    assert counts[2] == counts[-1]


@pytest.mark.parametrize("is_given", [True, False], ids=["node given", "node kept"])
@pytest.mark.parametrize("nodes", ["2 + 1", "1 + 2 + 1"])
def test_dropped_over_several_nodes(nodes, is_given):
    """A plan is closed when the next one of its ranks is made."""
    play_on(nodes, across_nodes, is_given, shared=True).ended_well()

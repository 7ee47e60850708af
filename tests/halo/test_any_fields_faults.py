"""A plan for any fields, and ranks that do not give the same: an error on each, and no hang."""

import pytest

import mpishare
from tests.helpers.scenes import BACKENDS, LIMIT_S, play
from tests.helpers.stage import Stage


def split(stage: Stage, is_new: bool) -> None:
    """Rank 1 gives what the others do not give, and what they may not have seen."""
    node = stage.node()
    halo = stage.make("plan of any fields", node)
    seen, other = node.xp.zeros(6), node.xp.zeros((6, 4), "f4")
    for u in (seen,) if is_new else (seen, other):
        for _ in range(3):
            halo.exchange(u)
    node.synchronize()
    stage.world.Barrier()  # not the node's, in which a rank would hear of a failure

    def go() -> None:
        for _ in range(3):
            halo.exchange(other if stage.rank == 1 else seen)
            node.synchronize()

    def again() -> None:
        with stage.node() as other:
            plan = mpishare.HaloExchange(stage.world, seen, 1, dims=(stage.size,), node=other)
            plan.exchange(seen)
            other.synchronize()

    stage.attempt("call", go)
    stage.attempt("then", halo.exchange, seen)
    stage.attempt("close", node.close)
    stage.attempt("again", again)


OTHERS = ("HaloExchange 1 of float64", "HaloExchange 1 of float32[4]")


@pytest.mark.parametrize(
    ("is_new", "words"),
    [(True, ["rank 1 in HaloExchange 1: exchange"]), (False, OTHERS)],
)
def test_ranks_that_give_other_fields(is_new, words):
    """They wait for each other, which is seen at once; another plan works.

    On GPUs a stream waits, and the deadline ends it.
    """
    played = play(3, split, is_new, shared=True)
    told = [played.told(rank, "call") for rank in range(3)]
    assert any(each.error == "MismatchError" for each in told), played.describe()
    for rank, each in enumerate(told):
        assert each.error in ("MismatchError", "PeerError"), played.describe()
        assert all(word in each.text for word in words), played.describe()
        assert each.seconds < LIMIT_S
        assert played.told(rank, "then").error is not None
    # Messages of rank 1, which the others never answered, must meet none of a later plan.
    played.worked(range(3), "again")


def refused(stage: Stage, way: str) -> None:
    """Rank 1 gives first what no plan takes."""
    node = stage.node()
    halo = stage.make("plan of any fields", node)
    seen = node.xp.zeros(6)
    halo.exchange(seen)
    if stage.rank == 1:
        stage.attempt("wrong", halo.exchange, node.xp.zeros(7) if way == "shape" else "u")
    stage.attempt("call", lambda: (halo.exchange(seen), node.synchronize()))
    stage.attempt("close", node.close)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("way", "error", "words"),
    [
        ("no array", "TypeError", "field 0 is"),
        ("shape", "ValueError", "field 0 of shape (7,) has (7,) cells"),
    ],
)
def test_what_no_plan_takes_is_refused_on_its_rank_alone(way, error, words, backend):
    """The others wait for the call until it is made right."""
    played = play(3, refused, way, backend=backend, shared=True)
    assert words in played.raised(1, "wrong", error).text
    played.worked(range(3), "call", "close")

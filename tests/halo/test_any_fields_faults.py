"""A plan for any fields, and ranks that do not give the same: an error on each, and no hang."""

import pytest

import mpishare
from tests.helpers.scenes import BACKENDS, LIMIT_S, play
from tests.helpers.stage import Stage


def split(stage: Stage) -> None:
    """Rank 1 gives what is new, the others what was seen before."""
    node = stage.node(timeout_s=20)
    halo = stage.make("plan of any fields", node)
    seen, new = node.xp.zeros(6), node.xp.zeros(6, "f4")
    for _ in range(3):
        halo.exchange(seen)
    node.synchronize()
    stage.world.Barrier()  # not the node's, in which a rank would hear of a failure

    def go() -> None:
        for _ in range(3):
            halo.exchange(new if stage.rank == 1 else seen)
            node.synchronize()

    def again() -> None:
        with stage.node(timeout_s=20) as other:
            plan = mpishare.HaloExchange(stage.world, seen, 1, dims=(stage.size,), node=other)
            plan.exchange(seen)
            other.synchronize()

    stage.attempt("call", go)
    stage.attempt("then", halo.exchange, seen)
    stage.attempt("close", node.close)
    stage.attempt("again", again)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_one_rank_has_seen_is_new_to_another(backend):
    """They wait for each other, which is seen at once; another plan works."""
    played = play(3, split, backend=backend, shared=True)
    for rank in range(3):
        told = played.told(rank, "call")
        assert told.error in ("MismatchError", "PeerError"), played.describe()
        assert "rank 1 in HaloExchange 1: exchange" in told.text
        assert told.seconds < LIMIT_S
        assert played.told(rank, "then").error is not None
    # Messages of rank 1, which the others never answered, must meet none of a later plan.
    played.worked(range(3), "again")


def refused(stage: Stage, way: str) -> None:
    """Rank 1 gives first what no plan takes."""
    node = stage.node(timeout_s=20)
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


def other(stage: Stage) -> None:
    """Each rank gives what all have seen, but not the same."""
    node = stage.node(timeout_s=20)
    halo = stage.make("plan of any fields", node)
    fields = [node.xp.zeros(6), node.xp.zeros((6, 4), "f4")]
    for u in fields:
        halo.exchange(u)
    node.synchronize()
    stage.world.Barrier()

    def go() -> None:
        for _ in range(3):
            halo.exchange(fields[stage.rank == 1])

    stage.attempt("call", go)
    stage.attempt("close", node.close)


def test_ranks_that_give_other_fields_each_seen_before():
    """They wait for each other: the error names what each of them has given."""
    played = play(3, other, shared=True)
    told = [played.told(rank, "call") for rank in range(3)]
    assert any(each.error == "MismatchError" for each in told), played.describe()
    for each in told:
        assert "HaloExchange 1 of float64" in each.text, played.describe()
        assert "HaloExchange 1 of float32[4]" in each.text, played.describe()
        assert each.seconds < LIMIT_S

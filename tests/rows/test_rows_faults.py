"""Ranks that are killed, late or raise amid rows, ranks of several nodes, and what they leave."""

import numpy as np
import pytest

import mpishare
from tests.helpers.scenes import BACKENDS, KILLING_BACKENDS, LIMIT_S, play
from tests.helpers.scenes_halo import play_on
from tests.helpers.stage import Stage


def random_rows(stage: Stage) -> None:
    from tests.helpers.random_rows import check_exchanges, check_migrations

    seen = set()
    with stage.node() as node:
        for seed in range(12):
            for swap in (
                check_exchanges(node, stage.world, seed),
                check_migrations(node, stage.world, seed),
            ):
                seen |= {*swap.routes.values()}
                swap.close()
    assert seen >= {"host", "mpi"}


@pytest.mark.parametrize("nodes", ["2 + 1", "2 + 2"])
def test_random_rows_over_nodes(nodes):
    play_on(nodes, random_rows, shared=True).ended_well()


def missed(
    stage: Stage, call: str, is_killed: bool, per_node: int = 0, by_nccl: bool = False
) -> None:
    import os

    from mpishare.runtime import places

    place = places.place
    if by_nccl:
        os.environ.update(NCCL_HOSTID=f"host{stage.rank}", NCCL_SOCKET_IFNAME="lo")
    elif os.environ["MPISHARE_BACKEND"] == "cuda":
        os.environ["MPISHARE_ROUTE"] = "fused"  # where ranks take turns of a GPU, too
    if per_node:
        places.place = lambda: [*place(), stage.rank // per_node]
    stage.quiet()
    node = stage.node()
    swap = mpishare.RowExchange(stage.world, ["f8"], 4, node=node)
    move = mpishare.Migration(swap)
    assert ("nccl" in swap.routes.values()) == by_nccl
    xp, to = node.xp, node.xp.full(8, node.rank, "i4")

    def exchange() -> None:
        swap.start([xp.zeros(8)], dict.fromkeys(swap.peers, (0, 3)))
        swap.wait()
        node.synchronize()

    def start() -> None:
        swap.start([xp.zeros(99)], dict.fromkeys(swap.peers, (0, 99)))

    def rounds() -> None:
        start()
        swap.wait([xp.zeros(300)], at="append", count=0)
        node.synchronize()

    def migrate() -> None:
        move.migrate([xp.zeros(8)], to, 4)
        node.synchronize()

    for _ in range(3):
        exchange()
        migrate()
    if call == "replay":
        columns, count = [xp.zeros(8)], xp.asarray(4, "i8")
        move.migrate(columns, to, count)
        replay = mpishare.capture(node, lambda: move.migrate(columns, to, count))
        replay()
    node.barrier()
    if per_node or not is_killed:
        stage.hurry(node, 5.0 if by_nccl else 2.0)
    stage.world.Barrier()
    if call == "rounds" and stage.rank == 1:
        start()
    if not stage.is_missing(dies=is_killed):
        calls = {"exchange": exchange, "migrate": migrate, "rounds": rounds}
        made = calls.get(call) or (lambda: (replay(), replay(), node.synchronize()))
        stage.attempt("first", made)
        stage.attempt("then", exchange)
        stage.attempt("close", node.close)
    stage.end()


@pytest.mark.parametrize("backend", KILLING_BACKENDS)
@pytest.mark.parametrize("call", ["exchange", "migrate"])
def test_all_survivors_name_the_killed_rank(call, backend):
    played = play(3, missed, call, True, survivable=True, backend=backend)
    played.survivors_name(1, of=(0, 2))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", ["exchange", "migrate"])
def test_a_rank_that_does_not_come_is_named_at_the_deadline(call, backend):
    played = play(3, missed, call, False, survivable=True, backend=backend)
    played.others_give_up()


@pytest.mark.gpu
@pytest.mark.kills
def test_a_rank_that_is_killed_between_rounds():
    played = play(3, missed, "rounds", True, survivable=True, backend="cuda")
    played.survivors_name(1, of=(0, 2))


@pytest.mark.gpu
def test_a_rank_that_takes_no_rounds():
    played = play(3, missed, "rounds", False, survivable=True, backend="cuda")
    played.others_give_up()


@pytest.mark.parametrize(
    ("n", "per_node", "is_killed"),
    [(3, 2, False), (2, 1, False), pytest.param(2, 1, True, marks=pytest.mark.kills)],
    ids=["late", "late elsewhere", "killed elsewhere"],
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", ["exchange", "migrate"])
def test_ranks_of_two_nodes_go_on_by_the_deadline(call, backend, n, per_node, is_killed):
    played = play(n, missed, call, is_killed, per_node, survivable=True, backend=backend)
    told = [played.told(rank, "first") for rank in (0, 2)[: n - 1]]
    for first in told:
        assert first.error in ("PeerTimeout", "PeerError"), played.describe()
        assert first.seconds < 3 + LIMIT_S
    assert any("rank 1 " in first.text for first in told), played.describe()
    played.worked((0, 2)[: n - 1], "close")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "is_killed", [pytest.param(True, marks=pytest.mark.kills), False], ids=["killed", "late"]
)
@pytest.mark.parametrize("call", ["exchange", "migrate", "rounds", "replay"])
def test_messages_of_nccl_end_by_the_deadline(call, is_killed):
    """Also where a message is sent once more, as its rows had no room."""
    played = play(2, missed, call, is_killed, 1, True, survivable=True, backend="cuda")
    first = played.told(0, "first")
    assert first.error in ("PeerTimeout", "PeerError"), played.describe()
    assert first.seconds < 6 + LIMIT_S, played.describe()
    assert "rank 1" in first.text, played.describe()
    played.worked([0], "close")


def grows(stage: Stage) -> None:
    """Slots grow at most steps; their files have names for a moment alone."""
    import os
    from pathlib import Path

    with stage.node() as node, mpishare.RowExchange(stage.world, ["f8"], 1, node=node) as swap:
        for count in (0, 3, 1, 50, 2, 400, 4000, 5):
            swap.start([np.arange(5000.0) + stage.rank], dict.fromkeys(swap.peers, (0, count)))
            swap.wait()
            for peer in swap.peers:
                assert (swap.received(peer)[0] == np.arange(count) + peer).all()
        node.barrier()
        assert not [*Path("/dev/shm").glob(f"mpishare-{os.getpid()}-*")]


def test_slots_that_grow_leave_no_files():
    play(3, grows, backend="host").ended_well()


def ends_first(stage: Stage) -> None:
    """Rank 1 looks for the rows of rank 0 when that one is about to finalize MPI."""
    import atexit

    world, others = stage.world, [1 - stage.rank]
    if stage.rank == 0:  # registered first: it runs after what the library has registered
        atexit.register(lambda: world.send(None, 1))
    swap = mpishare.RowExchange(world, ["f8"], peers=others, node=stage.node())
    swap.start([np.arange(3.0)], {others[0]: (0, 3)})
    if stage.rank == 1:
        world.recv(source=0)
    swap.wait()
    assert swap.received(others[0])[0].tolist() == [0, 1, 2]


def test_rows_outlive_the_program_that_sent_them():
    play(2, ends_first, backend="host").ended_well()

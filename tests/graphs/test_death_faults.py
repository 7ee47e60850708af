"""A rank dies or leaves while others replay a captured step, or are in a loop of one."""

import time

import pytest

import mpishare
from tests.helpers.scenes import KILLING_BACKENDS, play
from tests.helpers.stage import Stage


def killed(stage: Stage, way: str) -> None:
    import threading

    stage.quiet()
    node = stage.node()
    field, never = node.allocate_each(6, fill=0.0).array, node.xp.zeros(1, bool)
    halo = stage.ring(node, field)
    if way == "loop":
        step = mpishare.capture(node, halo.exchange, until=lambda _: never, at_most=10**9)
    else:
        step = mpishare.capture(node, halo.exchange)
        for _ in range(5):
            step(field)
    node.barrier()
    if stage.rank == 1:
        threading.Timer(0.4, stage.die).start()

    def until_it_fails():
        while True:
            step(field)
            node.synchronize()

    stage.attempt("first", until_it_fails)
    stage.attempt("then", step, field)
    if node.backend == "cuda":
        stream, end = node.xp.cuda.get_current_stream(), time.monotonic() + 10
        while not stream.done and time.monotonic() < end:
            time.sleep(0.01)
        mpishare_ended = stream.done
        stage.attempt("ended", lambda: 1 // mpishare_ended)
    stage.attempt("close", node.close)
    time.sleep(0.3)


@pytest.mark.parametrize("way", ["replays", "loop"])
@pytest.mark.parametrize("backend", KILLING_BACKENDS)
def test_survivors_name_the_killed_rank(backend, way):
    """The loop on their GPUs ends, too, which has 10^9 iterations."""
    played = play(2, killed, way, backend=backend, survivable=True)
    played.survivors_name(1, of=[0])
    if backend == "cuda":
        played.worked([0], "ended")

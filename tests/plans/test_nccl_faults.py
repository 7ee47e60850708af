"""A rank of another node dies, or does not come, while messages of NCCL wait for it."""

import contextlib
import functools

import pytest

import mpishare
from tests.helpers.scenes import play
from tests.helpers.stage import Stage

pytestmark = pytest.mark.gpu
LIMIT_S = 7.0
"""The deadline of the node, and the time of the first call before it."""
CALLS = ("exchange", "start", "replay", "graph", "plan", "init")


def missed(stage: Stage, call: str, is_killed: bool) -> None:
    import os

    import cupy

    from mpishare.backends import nccl
    from mpishare.runtime import places

    os.environ.update(NCCL_HOSTID=f"host{stage.rank}", NCCL_SOCKET_IFNAME="lo")
    place, begin = places.place, nccl.Communicator.begin
    places.place = lambda: [*place(), stage.rank]
    stage.quiet()
    device = stage.rank % cupy.cuda.runtime.getDeviceCount()
    node = mpishare.Node(stage.world, device=device, timeout_s=4.0)
    u, stream = cupy.zeros((64, 6)), cupy.cuda.Stream(non_blocking=True)

    def plan() -> mpishare.HaloExchange:
        grid = {"dims": (1, stage.size), "periods": True}
        return mpishare.HaloExchange(stage.world, u, (0, 1), node=node, **grid)

    def in_init(*arguments: object) -> object:
        return begin(*arguments) if not stage.is_missing(dies=is_killed) else stage.end()

    def halves() -> None:
        halo.start(u)
        halo.wait()

    with stream:
        if call == "init":
            nccl.Communicator.begin = in_init
            stage.attempt("first", plan)
        else:
            halo = plan()
            assert "nccl" in halo.routes.values()
            for _ in range(3):
                halo.exchange(u)
            step = mpishare.capture(node, lambda: halo.exchange(u))
            step()
            stream.begin_capture()
            halo.exchange(u)
            graph = stream.end_capture()
            node.synchronize()
            stage.world.Barrier()
            calls = {"replay": step, "graph": graph.launch, "start": halves, "plan": plan}
            made = calls.get(call, lambda: halo.exchange(u))
            if not stage.is_missing(dies=is_killed):
                # Twice: what is enqueued behind the first must end, too.
                stage.attempt("first", lambda: (made(), made(), node.synchronize()))
                stage.attempt("then", lambda: halo.exchange(u))
        if stage.rank == 0:
            stage.attempt("close", node.close)
            stage.attempt("gpu", lambda: int(cupy.arange(1000).sum()))
    stage.end()


@pytest.mark.parametrize(
    "is_killed", [pytest.param(True, marks=pytest.mark.kills), False], ids=["killed", "late"]
)
@pytest.mark.parametrize("call", CALLS)
def test_the_others_go_on_by_the_deadline(call, is_killed):
    played = play(2, missed, call, is_killed, survivable=True, backend="cuda")
    first = played.told(0, "first")
    assert first.error in ("PeerTimeout", "PeerError"), played.describe()
    assert first.seconds < LIMIT_S, played.describe()
    assert "rank 1" in first.text or call in ("plan", "init"), played.describe()
    played.worked([0], "close", "gpu")


def kept_graphs(stage: Stage, way: str) -> None:
    import os

    import cupy

    from mpishare.runtime import places

    os.environ.update(NCCL_HOSTID=f"host{stage.rank}", NCCL_SOCKET_IFNAME="lo")
    place = places.place
    places.place = lambda: [*place(), stage.rank]
    stage.quiet()
    device = stage.rank % cupy.cuda.runtime.getDeviceCount()
    global kept  # until the process ends
    kept = []
    for _ in range(3 if way == "steps" else 1):
        node = mpishare.Node(stage.world, device=device, timeout_s=10.0)
        u = cupy.zeros((64, 6))
        halo = stage.ring(node, u, axes=0)
        assert "nccl" in halo.routes.values()
        exchange = functools.partial(halo.exchange, u)
        exchange()
        if way == "steps":
            kept.append(mpishare.capture(node, exchange))
            for _ in range(3):
                kept[-1]()
        else:
            with cupy.cuda.Stream(non_blocking=True) as stream:
                stream.begin_capture()
                exchange()
                kept.append(stream.end_capture())
                kept[-1].launch()
        node.synchronize()
        stage.world.Barrier()
        if way != "graphs of its own":
            with contextlib.suppress(ZeroDivisionError), node:
                stage.leave()
            if way == "steps":
                stage.raises(mpishare.ClosedError, kept[-1])
            else:
                kept.clear()
        else:
            node.synchronize(stream)
            node.close()


@pytest.mark.parametrize("way", ["steps", "graphs of its own", "deleted behind an error"])
def test_graphs_that_are_kept(way):
    """NCCL ends no communicator that is in one: then no other begins, and an exit crashes."""
    play(2, kept_graphs, way, backend="cuda").ended()

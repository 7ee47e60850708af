"""Allreduce: a rank is interrupted or calls another thing; and over several nodes."""

import time

import numpy as np
import pytest

import mpishare
from tests.halo.test_death_faults import late
from tests.helpers.reporting import report
from tests.helpers.scenes import LIMIT_S, play
from tests.helpers.scenes_halo import NODES, play_on, size_of
from tests.helpers.stage import Stage


def interrupted_at_the_end(stage: Stage) -> None:
    """Rank 1 has done its share when it is interrupted; the others come to that point later."""
    from mpishare.reduction import slots

    node = stage.node()
    win = node.allocate_each(200_000, fill=1.0)
    total = mpishare.Allreduce(stage.world, win, node=node)
    total.reduce(win.array)
    spin, meet, calls = slots.spin_until, slots.Slots.meet, []

    def interrupt(*arguments: object) -> bool:
        calls.append(arguments)
        if len(calls) == stage.size:  # the first wait of the second barrier
            raise KeyboardInterrupt
        return spin(*arguments)

    def come_later(self, kind: int) -> None:
        calls.append(kind)
        if len(calls) == 2:
            time.sleep(0.5)
        meet(self, kind)

    if stage.rank == 1:
        slots.spin_until = interrupt
    else:
        slots.Slots.meet = come_later
    stage.attempt("call", total.reduce, win.array)
    win.array[...] = np.nan  # as the program may, where the call was cut off
    stage.attempt("close", node.close)


def test_a_rank_that_has_left_when_the_others_read_its_array():
    """They must not return what they could have read too late."""
    played = play(3, interrupted_at_the_end, shared=True)
    played.raised(1, "call", "KeyboardInterrupt")
    for rank in (0, 2):
        assert "KeyboardInterrupt" in played.raised(rank, "call", "PeerError").failures[1]


def ended(stage: Stage, where: str) -> None:
    """Rank 1 makes a sum as its last call, and its program ends before the others go on."""
    node = mpishare.Node()
    x = np.ones(400_000) if where == "private" else node.allocate_each(400_000, fill=1.0).array
    total = mpishare.Allreduce(stage.world, x, node=node)
    slots, state = mpishare.reduction.slots.Slots, node._context.agreement.block.state
    require_present = slots.require_present

    def require_later(self) -> None:
        is_over = mpishare.coordination.control_block.State.EXITED
        assert mpishare.coordination.poll.poll(lambda: state(1) == is_over, 20)
        require_present(self)

    if stage.rank != 1:
        slots.require_present = require_later
    stage.attempt("call", total.reduce, x)
    assert (x == stage.size).all()


@pytest.mark.parametrize("where", ["private", "window"])
def test_a_rank_whose_program_ends_with_a_large_sum(where):
    """Its array was read, and the others return: a program need not close its node."""
    played = play(3, ended, where)
    played.worked(range(3), "call")
    assert played.result.returncode == 0, played.describe()


def read_from(stage: Stage) -> None:
    """The others read the field of rank 1, which dies after the first barrier."""
    from mpishare.reduction import large

    stage.quiet()
    node = stage.node()
    field = np.ones(6 << 17)
    total = mpishare.Allreduce(stage.world, field, node=node)

    total.reduce(field)
    if stage.rank == 1:
        large.read_memory = lambda *_: stage.die()
    stage.attempt("call", total.reduce, field)
    stage.attempt("then", total.reduce, field)
    stage.attempt("close", node.close)
    stage.end()


def test_a_private_array_that_cannot_be_read_any_more():
    """Ranks that read from another process end with the reason."""
    played = play(3, read_from, survivable=True)
    for rank in (0, 2):
        assert played.raised(rank, "call", "PeerTimeout").ranks == [1]


def over_nodes(stage: Stage) -> None:
    from tests.helpers.reductions import laid_out, on_host, results_of_nodes, values

    with stage.node() as node:
        xp = node.xp
        groups, right = results_of_nodes(stage, node)
        cases = [("sum", "f8", (3,)), ("max", "i4", (5, 7)), ("sum", "c16", (30_000,))]
        cases += [("prod", "f4", (70, 90)), ("min", "?", (1,)), ("sum", "f2", (40_001,))]
        cases += [("sum", "f8", (0,)), ("sum", "u1", (200_003,)), ("sum", "f8", ())]
        cases += [("maxloc", "c16", (50_000,)), ("minloc", "c8", (5, 7))]
        for seed, (op, dtype, shape) in enumerate(cases):
            mine, wanted = values(dtype, shape, stage.rank, seed), right(op, dtype, shape, seed)
            for form in ("C", "strided", "F"):
                field = laid_out(xp, mine, form)
                with mpishare.Allreduce(stage.world, field, op, node=node) as total:
                    for _ in range(3):
                        field[...] = xp.asarray(mine)
                        total.reduce(field)
                        assert on_host(field).tobytes() == wanted.tobytes(), (op, dtype, form)
                    if op == "sum":
                        ones = xp.ones((stage.rank + 1, 2), dtype)
                        dot = float(np.real(on_host(total.dot(ones, ones))))
                        assert dot == stage.size * (stage.size + 1), (dtype, form)
    report({"nodes": len(groups)})


ON_GPUS = [pytest.param(nodes, "cuda", marks=pytest.mark.gpu) for nodes in ("1 + 1", "2 + 1")]


def assert_only_told_of_messages(played):
    """One rank says why NCCL takes none, or why they go through host memory, and nothing else."""
    lines = played.result.stderr.strip().splitlines()
    assert all("messages between nodes" in line for line in lines), played.describe()
    assert len(lines) <= 1, played.describe()


@pytest.mark.parametrize(
    ("nodes", "backend"), [*((nodes, "host") for nodes in (*NODES, "2 + 1 machines")), *ON_GPUS]
)
def test_over_nodes(nodes, backend):
    """The nodes' results in the order of their leaders, to the bit, on every rank."""
    played = play_on(nodes, over_nodes, backend=backend, shared=True)
    if backend == "cuda":
        assert played.result.returncode == 0, played.describe()
        assert_only_told_of_messages(played)
    else:
        played.ended_well()
    for rank in range(size_of(nodes)):
        assert played.rank(rank)["nodes"] == nodes.count("+") + 1 or nodes == "in turn"


def other_arrays_over_nodes(stage: Stage, limits: dict[str, int]) -> None:
    """Large arrays, new ones and kept ones in turns; the last rank's have gaps in one case."""
    from unittest import mock

    from mpishare.reduction import across_nodes
    from tests.helpers.reductions import laid_out, results_of_nodes, values

    shape = 301, 300
    with stage.node() as node, mock.patch.multiple(across_nodes, **limits):
        _, right = results_of_nodes(stage, node)
        wanted = [right("sum", "f8", shape, seed) for seed in range(4)]
        given = [values("f8", shape, stage.rank, seed) for seed in range(4)]
        for forms in ("C", "C"), ("F", "F"), ("C", "strided"):
            form = forms[stage.rank == stage.size - 1]
            kept = [laid_out(np, given[0], form) for _ in range(limits.get("_MAX_BOUND", 16) + 2)]
            with mpishare.Allreduce(stage.world, kept[0], node=node) as total:
                for call in range(3 * len(kept)):
                    is_new = call % 3 == stage.rank
                    field = laid_out(np, given[0], form) if is_new else kept[call // 2 % len(kept)]
                    field[...] = given[call % 4]
                    total.reduce(field)
                    assert field.tobytes() == wanted[call % 4].tobytes(), (form, call)


@pytest.mark.parametrize(
    "limits",
    [{"_MAX_BOUND": 3}, {"_PIECE_NBYTES": 40_000, "_MIN_IN_PLACE_NBYTES": 8}],
    ids=["whole", "pieces"],
)
@pytest.mark.parametrize("nodes", ["1 + 1", "2 + 1 + 1", "in turn"])
def test_other_arrays_over_nodes(nodes, limits):
    """Each call sends and stores its own, of more arrays than a leader keeps requests of."""
    play_on(nodes, other_arrays_over_nodes, limits, shared=True).ended_well()


def exact_over_nodes(stage: Stage) -> None:
    """Small and large arrays, and dot products, of which no node rounds its own part."""
    from tests.helpers.exact import factors, part, rounded_sum
    from tests.helpers.reductions import on_host

    with stage.node() as node:
        xp, size = node.xp, stage.size
        for count, some in (66, range(66)), (20_000, range(0, 20_000, 200)):
            x, y = factors("cancels", 1, count * size)
            rows = x.reshape(size, -1)
            mine = xp.asarray(rows[stage.rank].copy())
            with mpishare.Allreduce(stage.world, mine, exact=True, node=node) as total:
                for _ in range(2):
                    z = mine.copy()
                    found = on_host(total.reduce(z))
                    wanted = [rounded_sum([(rows[:, at], np.ones(size))], "f8") for at in some]
                    assert found[[*some]].tobytes() == np.array(wanted).tobytes()
                parts = [xp.asarray(part(each[:999], 3, stage.rank, size)) for each in (x, y)]
                for _ in range(2):
                    found = on_host(total.dot(*parts))
                    wanted = rounded_sum([(x[:999], y[:999])], "f8")
                    assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    ("nodes", "backend"), [*((nodes, "host") for nodes in ("1 + 1", "2 + 1", "in turn")), *ON_GPUS]
)
def test_exact_over_nodes(nodes, backend):
    """Rounded once, not by each node."""
    played = play_on(nodes, exact_over_nodes, backend=backend, shared=True)
    assert played.result.returncode == 0, played.describe()


def captured_over_nodes(stage: Stage) -> None:
    with stage.node() as node:
        x = node.xp.ones(3)
        total = mpishare.Allreduce(stage.world, x, node=node)
        stream = node.xp.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            stage.attempt("captured", total.reduce, x)
            stream.end_capture()
            stage.attempt("then", total.reduce, x)
            stream.synchronize()
        report({"found": x.tolist()})


@pytest.mark.gpu
def test_a_capture_over_nodes_is_refused():
    played = play_on("1 + 1", captured_over_nodes, backend="cuda")
    played.ended()
    assert_only_told_of_messages(played)
    for rank in range(2):
        assert "several nodes" in played.raised(rank, "captured", "UnsupportedError").text
        played.worked([rank], "then")
        assert played.rank(rank)["found"] == [2.0] * 3


@pytest.mark.parametrize("place", ["reduce", "reduce many"])
@pytest.mark.parametrize("missing", [2, 3], ids=["leader", "other"])
def test_a_rank_of_another_node_that_does_not_come(missing, place):
    """The leader here names that of the other node; the others here are told."""
    played = play_on("2 + 2", late, place, missing, shared=True)
    first = played.raised(0, "call", "PeerTimeout")
    assert "rank 2 of the plan's communicator" in first.text, first.text
    assert 1.9 <= first.seconds < 2 + LIMIT_S
    assert played.told(1, "call").error in ("PeerTimeout", "PeerError")
    for rank in (0, 1):
        assert played.told(rank, "then").error in ("PeerTimeout", "PeerError")
        played.worked([rank], "close")


def interrupted_over_nodes(stage: Stage) -> None:
    import gc
    import signal
    import weakref

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    stage.quiet()
    node = stage.node()
    x = np.ones(100_000)
    total = mpishare.Allreduce(stage.world, x, node=node)
    total.reduce(x)
    stage.hurry(node, 3.0)
    kept = weakref.ref(x)
    if stage.rank == 0:
        earlier = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        stage.attempt("call", total.reduce, x)
        signal.signal(signal.SIGALRM, earlier)
    else:
        time.sleep(0.5)
    stage.attempt("close", node.close)
    del x, total, node
    gc.collect()
    report({"is_kept": kept() is not None})


def test_an_array_whose_messages_are_under_way_is_not_freed():
    """MPI may read it at any time; one whose calls are over is not held."""
    played = play_on("1 + 1", interrupted_over_nodes, shared=True)
    played.raised(0, "call", "KeyboardInterrupt")
    assert [played.rank(rank)["is_kept"] for rank in range(2)] == [True, False]


def called_amid_the_sum_of_nodes(stage: Stage, exact: bool) -> None:
    import sys

    refused = []

    def call_between_waits(frame: object, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "fold":
            sys.setprofile(None)
            refused.append(stage.raises(mpishare.EpochError, lambda: total.dot(x, x)))

    node = stage.node()
    x = np.full(8, 1.0)
    total = mpishare.Allreduce(stage.world, x, node=node, exact=exact)
    sys.setprofile(call_between_waits if stage.rank == 0 else None)
    assert float(total.dot(x, x)) == 8.0 * stage.size
    sys.setprofile(None)
    assert len(refused) == (stage.rank == 0)
    node.close()


@pytest.mark.parametrize("exact", [False, True])
def test_a_handler_of_a_signal_may_not_call_amid_the_sum_of_nodes(exact):
    """Its messages would be taken for those of the sum under way."""
    play_on("1 + 1", called_amid_the_sum_of_nodes, exact, shared=True).ended_well()


def mismatched_over_nodes(stage: Stage) -> None:
    stage.quiet()
    node = stage.node()
    x = np.ones(4)
    total = mpishare.Allreduce(stage.world, x, node=node)
    stage.hurry(node, 3.0)
    first = (lambda: total.dot(x, x)) if stage.rank == 1 else (lambda: total.reduce(x))
    stage.attempt("call", first)
    stage.attempt("then", total.reduce, x)
    stage.attempt("close", node.close)


def test_a_node_whose_ranks_differ_does_not_go_on_one_call_behind_the_others():
    """Its next call would meet the one that the other node is still in: sums of two steps."""
    played = play_on("2 + 2", mismatched_over_nodes, shared=True)
    for rank in (0, 1):
        played.raised(rank, "call", "MismatchError")
        # PeerError on the one that sees the other leave before it leaves itself.
        told = played.told(rank, "then")
        assert told.error in ("MismatchError", "PeerError"), played.describe()
        assert "different calls" in told.text, played.describe()
    for rank in (2, 3):
        assert played.told(rank, "call").error in ("PeerTimeout", "PeerError")

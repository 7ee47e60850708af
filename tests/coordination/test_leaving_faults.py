"""A rank leaves by an exception, by a signal or by its exit: the others are told at once."""

import contextlib
import gc
import os
import signal
import sys
import time

import numpy as np
import pytest

import mpishare
from tests.helpers.compiled import needs_compiled
from tests.helpers.reporting import report
from tests.helpers.scenes import BACKENDS, play
from tests.helpers.stage import CALLS, Stage

LIMIT_S = 2.0
CODES = [pytest.param("compiled", marks=needs_compiled), "python"]


OBJECTS = ["plan", "sum", "window", "event", "channel", "pool"]


def leaves(stage: Stage, what: str, call: str) -> None:
    """Rank 1 raises in the block of a node or of an object, the others are in a call."""

    def work() -> None:
        node = stage.node()
        with node if what == "node" else stage.make(what, node) as made:
            calls = stage.calls(node, 1) | {"close": made.close}
            node.barrier()
            if stage.rank == 1:
                time.sleep(0.3 if what == "node" else 0)
                stage.leave()
            calls[call]()

    stage.is_left_by(1, work)
    stage.use_another_node()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", CALLS)
def test_a_rank_leaves_its_with_block_by_an_exception(place, backend):
    play(3, leaves, "node", place, backend=backend, shared=True).ended_well()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", ["barrier", "close"])
@pytest.mark.parametrize("what", OBJECTS)
def test_a_rank_leaves_the_with_block_of_an_object(what, call, backend):
    play(3, leaves, what, call, backend=backend, shared=True).ended()


def stream_waits(stage: Stage) -> None:
    def work() -> None:
        with stage.node() as node:
            import cupy

            window = node.allocate(8, fill=0.0)
            stream = cupy.cuda.Stream(non_blocking=True)
            node.barrier()
            if stage.rank == 1:
                time.sleep(0.3)
                stage.leave()
            try:
                window.start([1], stream)
                node.synchronize(stream)
            finally:
                time.sleep(0.3)
                assert stream.done

    stage.is_left_by(1, work, 2.3)


@pytest.mark.gpu
def test_a_stream_that_waits_for_a_rank_that_left_is_released():
    play(2, stream_waits, backend="cuda").ended_well()


def interrupted(stage: Stage, place: str) -> None:
    node = stage.node()
    channel = node.channel(10)
    node.barrier()
    victim, sent = stage.gather(os.getpid())[1], 0.0

    def work() -> None:
        nonlocal sent
        with node:
            if stage.rank == 0:
                time.sleep(0.4)
                sent = time.monotonic()
                os.kill(victim, signal.SIGINT)
                time.sleep(0.2)
            elif place == "loop":
                for slot in channel:
                    slot.sum()
            node.barrier()

    told = stage.raises(KeyboardInterrupt if stage.rank == 1 else mpishare.PeerError, work)
    end = time.monotonic()
    assert end - stage.world.bcast(sent) < 2
    assert stage.rank == 1 or told.failures[1] == "KeyboardInterrupt"
    stage.use_another_node()


@pytest.mark.parametrize("place", ["barrier", "loop"])
def test_a_keyboard_interrupt_in_a_wait(place):
    """Also that of a loop over the frames of a channel."""
    play(3, interrupted, place, shared=True).ended_well()


def handled(stage: Stage, code: str) -> None:
    things = {}
    calls = {
        "exchange": lambda: things["halo"].exchange(things["window"]),
        "start": lambda: (things["halo"].start(things["window"]), things["halo"].wait()),
        "accumulate": lambda: things["halo"].accumulate(things["window"]),
        "reduce": lambda: things["sum"].reduce(things["numbers"]),
        "fence": lambda: things["window"].fence(),
        "barrier": lambda: things["node"].barrier(),
    }

    def leave() -> None:
        things["node"].__exit__(RuntimeError, RuntimeError("the words of the handler"), None)
        stage.world.send(None, 1)
        stage.world.recv(source=1)  # now rank 1 is there, so that the call finds what it waits for
        things.clear()
        gc.collect()

    for name, call in calls.items():
        things["node"] = node = stage.node()
        # Faces of 640 kB, which a neighbor reads where they are.
        things["window"] = node.allocate_each((6, 80000), fill=1.0)
        things["halo"] = stage.ring(node, things["window"], axes=(0,))
        things["numbers"] = np.zeros(4)
        things["sum"] = mpishare.Allreduce(node.comm, things["numbers"], node=node)
        for each in calls.values():
            each()
        node.barrier()
        node._context.watchdog.stop()  # or rank 1 hears of it before its call
        del node
        if stage.rank == 0:
            stage.amid_next_wait(leave)
        else:
            stage.world.recv(source=0)
        told, allowed = "", (mpishare.PeerError if stage.rank else mpishare.ClosedError)
        try:
            call()
        except allowed as error:
            told = str(error)
        # Compiled code reads the faces where they are: they may be others by then.
        if (name, stage.rank, code) == ("exchange", 0, "compiled"):
            assert told.endswith("the words of the handler")
        if stage.rank == 1:
            stage.world.send(None, 0)
            with contextlib.suppress(mpishare.PeerError):
                things["node"].close()
    stage.use_another_node()


@pytest.mark.parametrize("code", CODES)
def test_a_handler_of_a_signal_leaves_within_a_call(code):
    """The memory of the other rank is mapped as long as the call goes on, which may look at it."""
    play(2, handled, code, env={"MPISHARE_HOST_CODE": code}, shared=True).ended_well()


def interrupted_start(stage: Stage, after: str) -> None:
    """A handler raises on rank 1 while that waits for a message of rank 0, which is late."""
    from mpishare.runtime import create

    def interrupt(*_: object) -> None:
        raise LookupError("the words of the handler")

    def late(*arguments: object, **options: object) -> object:
        value = work(*arguments, **options)
        if stage.rank == 0:
            time.sleep(3)
        else:
            signal.setitimer(signal.ITIMER_REAL, 1.0)
        return value

    signal.signal(signal.SIGALRM, interrupt)
    owner = create if after == "_build" else create.ControlBlock
    work = getattr(owner, after)
    setattr(owner, after, late)
    stage.attempt("call", stage.node)


@pytest.mark.parametrize("after", ["nbytes_for", "_build"], ids=["node", "all nodes"])
def test_a_handler_of_a_signal_raises_while_a_node_is_made(after):
    """In a step of the ranks of the node, within a step of all ranks; and in the latter."""
    played = play(2, interrupted_start, after)
    assert played.raised(1, "call", "LookupError").text == "the words of the handler"
    assert "aborts the job: Node was left by an exception: LookupError" in played.result.stderr
    assert played.result.returncode != 0
    assert played.result.seconds < 20


def interrupted_between_steps(stage: Stage, what: str, moment: str) -> None:
    """A handler raises on rank 1 behind the first step of a call, which is then made again."""

    def interrupted(*arguments: object) -> object:
        done = step(*arguments)
        if armed:
            armed.clear()
            raise LookupError("the words of the handler")
        return done

    def make() -> object:
        if what == "redistribution":
            return mpishare.Redistribute(stage.world, (6, 6), 0, 1, node=node)
        return stage.make(what, node)

    node = stage.node(timeout_s=20.0)
    agreement = node._context.agreement
    step, armed = agreement.step_keeping, [stage.rank == 1]
    made = None if moment == "made" else make()
    calls = {
        "made": make,
        "closed": lambda: made.close(),
        "turned": lambda: (
            made.accumulate(node.xp.zeros(4))
            if what == "plan"
            else made.backward(np.zeros(made.target_shape))
        ),
    }
    words = "the words of the handler"
    if stage.rank == 1:
        agreement.step_keeping = interrupted
        assert str(stage.raises(LookupError, calls[moment])) == words
        assert words in str(stage.raises(mpishare.ClosedError, node.barrier))
    else:
        told = stage.raises(mpishare.PeerError, calls[moment])
        assert f"LookupError: {words}" in told.failures[1]
        del told
    stage.use_another_node()


@pytest.mark.parametrize(
    ("what", "moment"),
    # The step that makes a sum is its last one.
    [(what, moment) for what in OBJECTS for moment in ("made", "closed") if what != "sum"]
    + [("sum", "closed"), ("plan", "turned"), ("redistribution", "turned")],
)
def test_a_call_that_is_interrupted_between_its_steps_leaves_the_node(what, moment):
    """Made again, its first step met the next one of the others, which took it for their own."""
    play(3, interrupted_between_steps, what, moment, shared=True).ended_well()


def interrupted_between_messages(stage: Stage) -> None:
    """The same, of a plan of two ranks of the node, which agree by messages."""

    def interrupted(*arguments: object) -> object:
        step(*arguments)
        group.step_keeping = step
        raise LookupError("the words of the handler")

    node = stage.node(timeout_s=20.0)
    pair = stage.world.Split(stage.rank == 2)
    if stage.rank < 2:
        plan = stage.ring(node, np.zeros(4), comm=pair)
        group = plan._setup.comm._ranks.group
        step = group.step_keeping
    call, words = plan.close if stage.rank < 2 else node.barrier, "the words of the handler"
    if stage.rank == 1:
        group.step_keeping = interrupted
        assert str(stage.raises(LookupError, call)) == words
        assert words in str(stage.raises(mpishare.ClosedError, call))
    for _ in {0: [1], 1: [], 2: [1, 2]}[stage.rank]:
        told = stage.raises(mpishare.PeerError, call)
        assert f"LookupError: {words}" in told.failures[1]
    stage.use_another_node()


def test_a_plan_of_some_ranks_that_is_interrupted_between_its_steps_leaves_the_node():
    play(3, interrupted_between_messages, shared=True).ended_well()


def nested(stage: Stage) -> None:
    """A handler on rank 0 calls the plan in the midst of its call, on both sides of it."""

    def call_inside() -> None:
        told = stage.raises(mpishare.EpochError, getattr(halo, inner), *fields)
        assert f"{inner} failed: another call of the plan is under way" in str(told)
        stage.world.send(None, 1)

    with stage.node(timeout_s=10.0) as node:
        u = np.zeros(66)
        halo = stage.ring(node, u)
        halo.exchange(u)
        halo.accumulate(u)
        for outer in ("exchange", "accumulate", "wait"):
            for inner in ("exchange", "accumulate", "start", "wait", "close"):
                fields = () if inner in ("wait", "close") else (u.copy(),)
                u[...] = 2.0 + stage.rank
                node.barrier()
                if stage.rank == 1:
                    stage.world.recv(source=0)
                if outer == "wait":
                    halo.start(u)
                if stage.rank == 0:
                    stage.amid_next_wait(call_inside)
                getattr(halo, outer)(*[u] * (outer != "wait"))
                theirs = 3.0 - stage.rank
                if outer == "accumulate":
                    right = u[0] == u[-1] == 0 and u[1] == u[-2] == 5.0
                else:
                    right = u[0] == u[-1] == theirs and (u[1:-1] == 2.0 + stage.rank).all()
                assert right, f"{inner} in {outer}: {u}"
    stage.use_another_node()


@pytest.mark.parametrize("code", CODES)
def test_a_handler_of_a_signal_cannot_call_a_plan_within_a_call(code):
    """Not in the other direction either; the call itself goes on, with right numbers."""
    play(2, nested, env={"MPISHARE_HOST_CODE": code}, shared=True).ended_well()


def exits(stage: Stage, way: str) -> None:
    node = stage.node()
    node.allocate(4)
    node.barrier()
    if stage.rank == 1:
        time.sleep(0.3)
        report({"left": time.monotonic()})
        if way == "exit":
            sys.exit(3)
        if way == "exit 0":
            sys.exit(0)
        raise ZeroDivisionError("the words of rank 1")
    stage.attempt("wait", node.barrier)


@pytest.mark.parametrize("way", ["exit", "exit 0", "raise"])
@pytest.mark.parametrize("python", [(), ("-m", "mpi4py")], ids=["python", "mpi4py"])
def test_a_rank_exits_outside_of_with(way, python):
    played = play(3, exits, way, python=python)
    left = played.rank(1)["left"]
    # Under `-m mpi4py` a failing rank aborts the job, maybe before the others have told anything.
    aborts = python and way != "exit 0"
    for rank in (0, 2):
        if aborts and rank not in played.result.reports:
            continue
        told = played.raised(rank, "wait", "PeerError")
        words = "ZeroDivisionError: the words of rank 1"
        expected = words if way == "raise" else "exited without closing the node"
        assert told.failures[1] == expected
        # By the barrier, or by the watchdog, whichever sees it first.
        who = {"Node.barrier", "the node"}
        assert told.text in {f"{each} failed: rank 1 has left: {expected}" for each in who}
        assert told.end - left < LIMIT_S
    assert played.result.seconds < 15
    if way == "exit 0":
        played.ended_well()
    else:
        assert played.result.returncode != 0, played.describe()


def takes_away(stage: Stage, call: str, dies: bool) -> None:
    from mpishare.coordination.poll import poll
    from mpishare.memory import shared

    node = stage.node(timeout_s=20.0)
    owner, attach = stage.world.bcast(os.getpid()), shared.attach

    def leave(*_: object) -> None:
        raise ZeroDivisionError("the words of rank 0")

    def attach_late(name: str, nbytes: int) -> object:
        if stage.rank == 1:
            os.kill(owner, signal.SIGKILL if dies else signal.SIGUSR1)

        def is_gone() -> bool:
            shared.remove_abandoned()  # as at the end of any rank
            return not os.path.lexists(f"{shared.FOLDER}/{name}")

        assert poll(is_gone, 10)
        return attach(name, nbytes)

    signal.signal(signal.SIGUSR1, leave)
    shared.attach = attach_late
    calls = {"allocate": lambda: node.allocate(8), "pool": lambda: node.pool(max_nbytes=4096)}
    stage.attempt("call", calls[call])


@pytest.mark.parametrize(
    ("call", "dies"), [("allocate", False), ("allocate", True), ("pool", False)]
)
def test_an_owner_that_goes_between_publishing_and_opening_is_named(call, dies):
    """What it shared went with it: the others are told so, and not of a file that is missing."""
    played = play(3, takes_away, call, dies, survivable=dies)
    for rank in (1, 2):
        told = played.raised(rank, "call", "PeerTimeout" if dies else "PeerError")
        assert told.ranks == [0]
        assert dies or "ZeroDivisionError: the words of rank 0" in told.text


def goes_between_steps(stage: Stage) -> None:
    from mpishare.coordination.agreement import Agreement
    from mpishare.coordination.poll import poll
    from mpishare.memory import shared

    node = stage.node(timeout_s=20.0)
    forget, require = shared.forget, Agreement.require_all_here
    attach, step_keeping = shared.attach, Agreement.step_keeping

    def leave_before_attaching(self, call, work):
        if work.__name__ == "attach":
            raise ZeroDivisionError("the words of rank 0")
        return step_keeping(self, call, work)

    def forget_and_hold(name: str) -> None:
        forget(name)
        for rank in (1, 2):
            stage.world.recv(source=rank)

    def attach_late(name: str, nbytes: int) -> object:
        assert poll(lambda: not os.path.lexists(f"{shared.FOLDER}/{name}"), 10)
        return attach(name, nbytes)

    def require_and_tell(self: Agreement, call: str) -> None:
        require(self, call)
        stage.world.send(None, 0)

    if stage.rank == 0:
        Agreement.step_keeping, shared.forget = leave_before_attaching, forget_and_hold
    else:
        shared.attach, Agreement.require_all_here = attach_late, require_and_tell
    text = stage.fails_on(0, ZeroDivisionError, lambda: node.pool(max_nbytes=4096))
    assert "the words of rank 0" in text


def test_an_owner_whose_file_goes_before_its_last_words_is_named():
    """The others look between the two: nobody has left, and the file is not there."""
    play(3, goes_between_steps).ended_well()


def interrupted_call(stage: Stage, way: str) -> None:
    cart = stage.world.Create_cart([2])
    node = stage.node() if way == "plan beside a node" else None
    sleep = time.sleep

    def interrupt(_: float) -> None:
        time.sleep = sleep
        cart.isend(None, 1)
        signal.raise_signal(signal.SIGINT)

    if stage.rank == 0:
        time.sleep = interrupt  # in the midst of its wait
    else:
        cart.recv(source=0)
    try:
        stage.node(cart) if way == "node" else mpishare.HaloExchange(cart, np.zeros(8), 1)
    except mpishare.PeerError as error:
        report({"failures": error.failures[0]})
        raise
    del node


@pytest.mark.parametrize("way", ["node", "plan"])
def test_an_interrupt_in_a_call_of_no_node(way):
    """The other rank comes later, and waits in vain: it is told so, or the job ends."""
    played = play(2, interrupted_call, way)
    assert played.result.returncode != 0, played.describe()
    said = played.result.stderr
    assert "KeyboardInterrupt" in said, played.describe()
    if way == "plan beside a node":
        assert played.rank(1)["failures"] == "KeyboardInterrupt", played.describe()
    else:
        assert "was left by an exception: KeyboardInterrupt" in said, played.describe()


def leaves_before_a_plan(stage: Stage, way: str) -> None:
    """Rank 0 raises where the other makes the node's first plan; later attempts are right."""
    world = stage.world
    # Of several nodes the plans of the same ranks share a communicator.
    other = stage.node(timeout_s=10.0) if way == "two nodes" else None
    kept = None if other is None else stage.ring(other, np.zeros(4))
    new = world.Split(0, stage.rank) if way == "a new communicator" else None

    def attempt(number: int) -> None:
        with stage.node(timeout_s=10.0) as node:
            if number == 0 and stage.rank == 0:
                if way == "another call":
                    node.allocate(3)
                raise ZeroDivisionError("the words of rank 0")
            with stage.ring(node, np.zeros(5), comm=new) as halo:
                halo.exchange(np.zeros(5))

    for number in range(3):
        if number:
            attempt(number)
        elif way == "another call":
            stage.raises(mpishare.MismatchError, attempt, 0)
        else:
            text = stage.fails_on(0, ZeroDivisionError, lambda: attempt(0))
            assert "the words of rank 0" in text
        if way == "barrier":
            world.Barrier()
    if other is not None:
        world.Barrier()
        stage.ring(other, np.zeros(4)).exchange(np.zeros(4))
        kept.close()
    mine, total = np.ones(1), np.zeros(1)
    (new or world).Iallreduce(mine, total).Wait()
    assert total == 2


@pytest.mark.parametrize(
    "way", ["barrier", "at once", "another call", "two nodes", "a new communicator"]
)
def test_an_error_before_a_first_plan_leaves_communicators_whole(way):
    play(2, leaves_before_a_plan, way, shared=True).ended_well()


def raises_beside_a_newer(stage: Stage, kind: str) -> None:
    node = stage.node(timeout_s=30.0)
    window = node.allocate(4)
    newer = mpishare.Node() if kind == "node" else mpishare.Allreduce(stage.world, np.ones(3))
    if stage.rank:
        raise ZeroDivisionError("the words of rank 1")
    stage.attempt("fence", window.fence)
    del newer


@pytest.mark.parametrize("kind", ["node", "plan"])
def test_an_uncaught_exception_leaves_all_nodes_of_the_program(kind):
    """The other rank waits on the older node, and gets the error within seconds."""
    told = play(2, raises_beside_a_newer, kind).raised(0, "fence", "PeerError")
    assert "ZeroDivisionError: the words of rank 1" in told.text
    assert told.seconds < LIMIT_S


def leaves_behind_a_newer(stage: Stage, message: str) -> None:
    """Rank 0 looks in the last step of `Node` for the first time when rank 1 has left behind it."""
    from mpishare.coordination import mpi_agreement
    from mpishare.runtime import create

    node = stage.node(timeout_s=30.0)
    window = node.allocate(4)
    comm, build, poll = stage.world.Dup(), create._build, mpi_agreement.poll

    def never(*_):
        mpi_agreement.poll = poll
        return False

    def late(is_done, timeout_s, look, **others):
        mpi_agreement.poll = never if message == "is late" else poll
        assert not is_done()
        comm.send(None, 1)
        assert poll(lambda: node._context.agreement.failure, 20.0)
        look()
        return poll(is_done, timeout_s, look, **others)

    def build_first(*arguments):
        built = build(*arguments)
        if stage.rank:
            comm.recv(source=0)
        else:
            mpi_agreement.poll = late
        return built

    create._build = build_first
    words = "ZeroDivisionError: the words of rank 1"
    if stage.rank == 0 and message == "is late":
        assert stage.raises(mpishare.PeerError, stage.node).failures == {1: words}
        assert mpi_agreement.poll is poll
        comm.Barrier()  # the message is here
        return
    newer = stage.node()
    if stage.rank == 1:
        with contextlib.suppress(ZeroDivisionError), node:
            raise ZeroDivisionError("the words of rank 1")
    else:
        assert mpi_agreement.poll is poll
        assert stage.raises(mpishare.PeerError, window.fence).failures == {1: words}
    if message == "comes":
        newer.close()
    else:
        assert words in stage.raises(mpishare.PeerError, newer.close).failures[0]
        comm.Barrier()


def leaves_amid_a_newer(stage: Stage, before: str) -> None:
    """Rank 1 has left, and lives on, when rank 0 comes to a later step of `Node`."""
    from mpishare.coordination.poll import poll
    from mpishare.runtime import create

    node = stage.node(timeout_s=20.0)
    comm, duplicate, control_block = stage.world.Dup(), create.duplicate, create._control_block

    def interrupt(*_):
        raise KeyboardInterrupt("the words of rank 1")

    def begin(*arguments):
        create.duplicate = duplicate
        comm.send(None, 1)
        return duplicate(*arguments)

    def wait(*arguments):
        assert poll(lambda: node._context.agreement.failure, 20.0)
        return control_block(*arguments)

    if before == "a block was left":  # which rank 1 leaves while rank 0 is in `Node`
        if stage.rank == 0:
            create.duplicate = begin
        with contextlib.suppress(ZeroDivisionError), node.pool(max_nbytes=4096):
            if stage.rank == 1:
                comm.recv(source=0)
            raise ZeroDivisionError
    if stage.rank == 0:
        create._control_block = wait
        stage.attempt("node", stage.node)
        comm.send(None, 1)
    else:
        create._control_block = interrupt
        with contextlib.suppress(KeyboardInterrupt), node:
            stage.node()
        comm.recv(source=0)


def raises_without_a_text(stage: Stage) -> None:
    class UntoldError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def work() -> None:
        with stage.node(timeout_s=20.0) as node:
            if stage.rank == 0:
                raise UntoldError
            node.barrier()

    if stage.rank == 0:
        stage.raises(UntoldError, work)
    else:
        told = stage.raises(mpishare.PeerError, work, within_s=2)
        assert "UntoldError: (its text raised RuntimeError)" in str(told)
    stage.world.Barrier()


def test_an_exception_whose_text_raises_is_told():
    play(2, raises_without_a_text, shared=True).ended_well()


def plans_of_threads(stage: Stage) -> None:
    """Each thread has a node and a communicator of its own, of the same ranks."""
    import threading

    def work(number: int) -> None:
        size = 3 + number
        with stage.node(comms[number], timeout_s=20.0) as node:
            for step in range(20):
                field = np.full(size + 2, 10.0 * number + stage.rank + step)
                with stage.ring(node, field, comm=comms[number]) as halo:
                    halo.exchange(field)
                wanted = 10.0 * number + (1 - stage.rank) + step
                wrong.append(field[[0, -1]].tolist() != [wanted] * 2)

    comms, wrong = [stage.world.Dup() for _ in range(3)], []
    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [False] * 60


def test_threads_with_a_node_each_have_plans_of_their_own():
    play(2, plans_of_threads).ended_well()


def interrupted_behind(stage: Stage, name: str) -> None:
    """Ctrl-C on rank 1, where Python enters its next function of mpishare behind the engine."""
    node = stage.node(timeout_s=5.0)
    n, right = stage.size, (stage.rank + 1) % stage.size
    u = np.zeros(6)
    halo = stage.ring(node, u)
    turned = mpishare.Redistribute(stage.world, (4, 2 * n), source=0, target=1, node=node)
    out = np.zeros((2, 4)).T  # not as the plan writes: it is copied into
    ranks = np.repeat(range(n), 4 // n)[:, None]

    def part(k: int) -> np.ndarray:
        return np.full(turned.source_shape, 10.0 * k) + stage.rank

    def filled(k: int) -> np.ndarray:
        u[...] = 10.0 * k + stage.rank
        return u

    # A call that sends, one that returns what has arrived, and the right values.
    calls = {
        "exchange": (lambda k: halo.exchange(filled(k)), lambda: u[-1], right),
        "start": (lambda k: halo.start(filled(k)), lambda: (halo.wait(), u[-1])[1], right),
        "forward": (lambda k: turned.forward(part(k), out), lambda: out, ranks),
        "redistribute": (lambda k: turned.start(part(k)), turned.wait, ranks),
    }
    call, came, wanted = calls[name]
    # The call of C that ends it: `forward` makes it in two halves, since `out` is copied into.
    last = {"exchange": "try_exchange", "forward": "wait"}.get(name, "try_start")
    is_behind = False

    def interrupt(frame: object, event: str, value: object) -> None:
        nonlocal is_behind
        if event == "c_return" and value.__name__ == last:
            is_behind = True
        elif event == "call" and is_behind and "/mpishare/" in frame.f_code.co_filename:
            raise KeyboardInterrupt

    def interrupted(k: int) -> None:
        sys.setprofile(interrupt)
        try:
            call(k)
        finally:
            sys.setprofile(None)

    def work() -> None:
        for k in range(1, 5):
            try:
                (interrupted if (stage.rank, k) == (1, 2) else call)(k)
            except KeyboardInterrupt:
                with contextlib.suppress(mpishare.EpochError):  # it is open
                    call(k)
            found = came()
            assert (found == 10.0 * k + np.array(wanted)).all(), f"call {k} brought {found}"

    stage.attempt("calls", work)


@pytest.mark.parametrize("name", ["exchange", "start", "forward", "redistribute"])
def test_an_interrupt_behind_a_call_leads_to_no_wrong_number(name):
    """Made again, the others would take it for the next one."""
    played = play(2, interrupted_behind, name)
    for rank in range(2):
        ends = {"ClosedError", "PeerError"} if name == "forward" else {None}  # it left the node
        assert played.told(rank, "calls").error in ends, played.describe()

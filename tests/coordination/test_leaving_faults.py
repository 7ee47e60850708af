"""A rank leaves by an exception, by a signal or by its exit: the others are told at once."""

import builtins
import os
import signal
import sys
import time

import numpy as np
import pytest

import mpishare
from tests.helpers.compiled import needs_compiled
from tests.helpers.reporting import report
from tests.helpers.scenes import BACKENDS, LIMIT_S, play
from tests.helpers.scenes_halo import play_on
from tests.helpers.stage import CALLS, Stage, leftovers

CODES = [pytest.param("compiled", marks=needs_compiled), "python"]


ON_GPU = pytest.param("exchange", "cuda", marks=pytest.mark.gpu)
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


def amid_waits(stage: Stage, raises: bool) -> None:
    """A handler on rank 0 raises, or calls and closes what it meets, amid each kind of wait."""
    for name in ("exchange", "accumulate", "give back", "wait", "reduce", "fence", "barrier"):
        node = stage.node()
        window, numbers = node.allocate_each(66, fill=1.0), np.ones(4)
        u = window.array
        halo = stage.ring(node, u)
        total = mpishare.Allreduce(node.comm, numbers, node=node)
        calls = {
            "exchange": lambda halo=halo, u=u: halo.exchange(u),
            "accumulate": lambda halo=halo, u=u: halo.accumulate(u),
            "give back": lambda halo=halo, u=u: halo.accumulate(u, give_back=True),
            "wait": lambda halo=halo, u=u: (halo.start(u), halo.wait()),
            "reduce": lambda total=total, numbers=numbers: total.reduce(numbers),
            "fence": window.fence,
            "barrier": node.barrier,
        }
        for call in calls.values():
            call()
        node.barrier()
        inner = [*calls.values(), halo.close, total.close, node.close]

        def handler(inner=inner) -> None:
            if raises:
                stage.world.send(None, 1)
                raise KeyboardInterrupt("the words of the handler")
            for each in inner:
                stage.raises(mpishare.EpochError, each)
            stage.world.send(None, 1)

        u[...], numbers[...] = 1.0 + stage.rank, 1.0 + stage.rank
        if stage.rank == 0:
            stage.amid_next_wait(handler)
        else:
            stage.world.recv(source=0)
        if not raises:
            calls[name]()
            right = dict.fromkeys(("exchange", "wait"), 2.0 - stage.rank) | {"give back": 3.0}
            assert name == "accumulate" or u[0] == u[-1] == right.get(name, 1.0 + stage.rank)
            assert name != "reduce" or numbers.tolist() == [3.0] * 4
        elif stage.rank == 0:
            stage.raises(KeyboardInterrupt, calls[name])
            words = str(stage.raises(mpishare.ClosedError, node.barrier))
        else:
            both = calls[name], node.barrier  # maybe it finds what it waits for
            told = stage.raises(mpishare.PeerError, lambda both=both: [call() for call in both])
            words = told.failures[0]
        assert not raises or "KeyboardInterrupt: the words of the handler" in words
        node.close()
    stage.use_another_node()


def amid_calls(stage: Stage, name: str) -> None:
    at, file = ("c_call", "/plans/") if name == "exchange" else ("call", "/reduction/host.py")

    def interrupt(frame, event, _) -> None:
        if event == at and file in frame.f_code.co_filename:
            raise LookupError("in the midst of a call")

    def call() -> None:
        sys.setprofile(interrupt)  # until it raises
        calls[name]()

    node = stage.node()
    u = node.xp.ones(66)
    halo = stage.ring(node, u)
    total = mpishare.Allreduce(stage.world, u, node=node)
    calls = {
        "exchange": lambda: halo.exchange(u),
        "reduce": lambda: total.reduce(u),
        "dot": lambda: total.dot(u, u),
    }
    for _ in range(3):  # on GPUs launched, as a graph, and by the fast path
        calls[name]()
    node.barrier()
    if stage.rank == 0:
        stage.raises(LookupError, call)
        words = str(stage.raises(mpishare.ClosedError, calls[name]))
    else:
        told = stage.raises(mpishare.PeerError, lambda: [calls[name](), node.barrier()])
        words = told.failures[0]
    assert "LookupError: in the midst of a call" in words
    node.close()
    stage.use_another_node()


@pytest.mark.parametrize(
    ("call", "backend"), [("reduce", "host"), ("dot", "host"), ("exchange", "host"), ON_GPU]
)
def test_an_exception_between_the_functions_of_a_call_ends_the_node(call, backend):
    """As of a handler of a signal: the call may have been made for the others."""
    play(2, amid_calls, call, backend=backend).ended_well()


@pytest.mark.parametrize("code", CODES)
def test_a_handler_of_a_signal_may_not_call_amid_a_wait(code):
    """The call itself goes on, with right numbers."""
    play(2, amid_waits, False, env={"MPISHARE_HOST_CODE": code}, shared=True).ended_well()


@pytest.mark.parametrize("code", CODES)
def test_a_handler_of_a_signal_that_raises_in_a_wait_ends_the_node(code):
    play(2, amid_waits, True, env={"MPISHARE_HOST_CODE": code}, shared=True).ended()


def amid_first_looks(stage: Stage, name: str) -> None:
    def look(frame, event, called) -> None:
        is_python = event == "call" and frame.f_code.co_name == "spin_until"
        if is_python or getattr(called, "__qualname__", "") == "Fence.meet":
            sys.setprofile(None)
            stage.raises(mpishare.EpochError, node.synchronize)
            stage.world.send(None, 1)

    node, is_late = stage.node(), stage.rank == 1
    window, event = node.allocate(4), node.event(owner=1)
    calls = {
        "fence": (window.fence, window.fence),
        "barrier": (node.barrier, node.barrier),
        "start": (lambda: window.start([1]), lambda: window.post([0])),
        "event": (event.wait, event.record),
    }
    if is_late:
        stage.world.recv(source=0)
    else:
        sys.setprofile(look)  # until it has called
    calls[name][is_late]()
    assert sys.getprofile() is None
    node.barrier()
    stage.end()


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("call", ["fence", "barrier", "start", "event"])
def test_a_handler_of_a_signal_may_not_call_amid_the_first_looks(call, code):
    """Before the call waits with a deadline: a fence within a fence would count as one."""
    env = {"MPISHARE_HOST_CODE": code}
    play(2, amid_first_looks, call, env=env, shared=True).ended_well()


def fails_on_another_node(stage: Stage) -> None:
    from mpishare.runtime import create

    def fail(*_: object) -> None:
        raise LookupError("not here")

    name, error = "_make_context", mpishare.PeerError
    make = getattr(create, name)
    if stage.rank == 2:
        error = LookupError
        setattr(create, name, fail)
    assert "not here" in str(stage.raises(error, stage.node))
    setattr(create, name, make)
    assert leftovers() == []
    stage.use_another_node()


def test_a_node_is_left_where_another_one_of_its_communicator_fails():
    play_on("2 + 1", fails_on_another_node, shared=True).ended_well()


def interrupted_between_steps(stage: Stage, what: str, moment: str) -> None:
    """A handler raises on rank 1 behind the first step of a call, which is then made again."""
    from mpishare.plans.node_cache import context_of

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

    node = stage.node()
    agreement = context_of(node).agreement
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
    with stage.node() as node:  # what its plans say to each other is of no earlier one
        u = np.full(4, float(stage.rank))
        stage.ring(node, u).exchange(u)
        assert u[0] == (stage.rank - 1) % stage.size


@pytest.mark.parametrize(
    ("what", "moment"),
    # The step that makes a sum or an event is its last one.
    [(what, "made") for what in OBJECTS if what not in ("sum", "event")]
    + [(what, "closed") for what in OBJECTS]
    + [("plan", "turned"), ("redistribution", "turned")],
)
def test_a_call_that_is_interrupted_between_its_steps_leaves_the_node(what, moment):
    """Made again, its first step met the next one of the others, which took it for their own."""
    play(3, interrupted_between_steps, what, moment, shared=True).ended_well()


def interrupted_amid_a_step(stage: Stage, name: str) -> None:
    error = getattr(builtins, name)

    def load() -> list:
        signal.raise_signal(signal.SIGUSR2)
        return [1.0]

    def handler(*_: object) -> None:
        raise error("the words of the handler")

    signal.signal(signal.SIGUSR2, handler)
    node = stage.node()
    words = f"{name}: the words of the handler"
    told = stage.fails_on(1, error, lambda: node.share(load, owner=1))
    assert told == (words.partition(": ")[2] if stage.rank == 1 else words)
    if name == "LookupError":  # a failure of the work of the step
        node.barrier()
        node.close()
    else:
        assert words in stage.fails_on(1, mpishare.ClosedError, node.barrier)
    stage.use_another_node()


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "SystemExit", "LookupError"])
def test_an_interrupt_amid_a_step_ends_the_node(error):
    """An `Exception` leaves it whole."""
    play(2, interrupted_amid_a_step, error, shared=True).ended()


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
    if way == "exit 0":
        played.ended_well()
    else:
        assert played.result.returncode != 0, played.describe()


def takes_away(stage: Stage, dies: bool) -> None:
    from mpishare.coordination.poll import poll
    from mpishare.memory import shared

    node = stage.node()
    owner, attach = stage.world.bcast(os.getpid()), shared.attach

    def leave(*_: object) -> None:
        raise ZeroDivisionError("the words of rank 0")

    def attach_late(name: str, nbytes: int) -> object:
        if stage.rank == 1:
            os.kill(owner, signal.SIGKILL if dies else signal.SIGUSR1)

        def is_gone() -> bool:
            shared.remove_abandoned()  # as another node
            return not os.path.lexists(f"{shared.FOLDER}/{name}")

        assert poll(is_gone, 10)
        return attach(name, nbytes)

    signal.signal(signal.SIGUSR1, leave)
    shared.attach = attach_late
    stage.attempt("call", lambda: node.allocate(8))


@pytest.mark.parametrize("dies", [False, True])
def test_an_owner_that_goes_between_publishing_and_opening_is_named(dies):
    """What it shared went with it: the others are told so, and not of a file that is missing."""
    played = play(3, takes_away, dies, survivable=dies)
    for rank in (1, 2):
        told = played.raised(rank, "call", "PeerTimeout" if dies else "PeerError")
        assert told.ranks == [0]
        assert dies or "ZeroDivisionError: the words of rank 0" in told.text


def interrupted_call(stage: Stage, way: str, error: str) -> None:
    cart = stage.world.Create_cart([2])
    sleep = time.sleep

    def interrupt(_: float) -> None:
        time.sleep = sleep
        cart.isend(None, 1)
        if error == "LookupError":
            raise LookupError("of the handler of a signal")
        signal.raise_signal(signal.SIGINT)

    if stage.rank == 0:
        time.sleep = interrupt  # in the midst of its wait
    else:
        cart.recv(source=0)
    stage.node(cart) if way == "node" else mpishare.HaloExchange(cart, np.zeros(8), 1)


@pytest.mark.parametrize(
    ("way", "error"),
    [("node", "KeyboardInterrupt"), ("node", "LookupError"), ("plan", "KeyboardInterrupt")],
)
def test_an_interrupt_in_a_call_of_no_node(way, error):
    """The other rank comes later, and waits in vain: it is told so, or the job ends."""
    played = play(2, interrupted_call, way, error)
    assert played.result.returncode != 0, played.describe()
    assert f"was left by an exception: {error}" in played.result.stderr, played.describe()


def raises_beside_a_newer(stage: Stage, kind: str) -> None:
    node = stage.node()
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


def plans_of_threads(stage: Stage) -> None:
    """Each thread has a node and a communicator of its own, of the same ranks."""
    import threading

    def work(number: int) -> None:
        size = 3 + number
        with stage.node(comms[number]) as node:
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

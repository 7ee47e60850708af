"""What a failed collective leaves behind: ranks in step, nothing open, and words for everyone."""

import functools
import gc
import random
import threading
import time
import weakref

import pytest

import mpishare.runtime.create
from mpishare import ClosedError, MismatchError, Node, PeerError, PeerTimeout
from mpishare.backends.host import HostBackend
from mpishare.coordination import mpi_agreement
from mpishare.coordination.agreement import is_agreed, require_same
from mpishare.memory import shared
from mpishare.plans.node_cache import context_of
from tests.helpers.held import held

TWO = pytest.mark.ranks(min=2)


def raised(kind, call):
    with pytest.raises(kind) as caught:
        call()
    return caught.value


@pytest.fixture(params=["the node", "messages"])
def step_keeping(request, comm):
    """`step_keeping` of a call, by each of its two ways."""
    if request.param == "the node":
        with Node(comm) as node:
            yield functools.partial(context_of(node).agreement.step_keeping, "a call")
    else:
        watch = mpi_agreement.CommWatch("a call", 30.0)
        yield lambda work: mpi_agreement.agree_keeping(comm, work, watch)


def test_a_step_keeps_any_object_of_its_rank(comm, step_keeping):
    mine = object()
    kept, replies = step_keeping(lambda: (mine, {"rank": comm.rank}))
    assert kept is mine
    assert replies == [{"rank": rank} for rank in range(comm.size)]


@TWO
def test_a_step_that_fails_on_one_rank_keeps_nothing(comm, step_keeping):
    def work():
        if not comm.rank:
            raise ValueError("not here")
        return object(), None

    error = raised(PeerError if comm.rank else ValueError, lambda: step_keeping(work))
    assert "not here" in str(error)
    assert step_keeping(lambda: (comm.rank, 1)) == (comm.rank, [1] * comm.size)


@TWO
def test_windows_closed_in_another_order_are_both_still_open(comm):
    with Node(comm) as node:
        one, two = node.allocate(2, fill=1), node.allocate(2, fill=2)
        error = raised(MismatchError, (one if node.is_leader else two).close)
        assert error.ranks
        assert not one.is_closed
        assert not two.is_closed
        assert (one.array.tolist(), two.array.tolist()) == ([1, 1], [2, 2])
    assert one.is_closed
    assert two.is_closed


@TWO
def test_a_close_that_fails_is_told_to_all(comm):
    node = Node(comm, timeout_s=50.0)
    error = raised(MismatchError, node.close if node.is_leader else node.collect)
    assert error.ranks
    if node.is_leader:
        assert node.is_closed
        raised(ClosedError, node.barrier)
        node.close()
    else:
        # At once, not after the deadline: the leader has left, and said why.
        failures = raised(PeerError, node.barrier).failures
        assert [*failures] == [0]
        assert failures[0].startswith("MismatchError")
        node.close()
    Node(comm).close()


def broken(comm, monkeypatch, where):
    """Let the last rank fail at one place of `Node()`."""

    def refuse(*_):
        raise OSError("not here")

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(*where, refuse)


@TWO
@pytest.mark.parametrize("place", ["attach", "backend"])
def test_a_node_that_cannot_be_made_leaves_nothing(comm, monkeypatch, place):
    where = (shared, "attach") if place == "attach" else (mpishare.runtime.create, "_backend")
    with monkeypatch.context() as patch:
        broken(comm, patch, where)
        kind = OSError if comm.rank == comm.size - 1 else PeerError
        raised(kind, lambda: Node(comm))
        files, threads = held().fds, threading.active_count()  # those of broken nodes may end yet
        for _ in range(10):
            raised(kind, lambda: Node(comm))
        assert held().fds == files
        assert threading.active_count() <= threads
    Node(comm).close()


def test_an_error_of_a_function_that_is_called_is_of_this_rank_alone():
    """A `raise` of ours says what all ranks know; Python and NumPy raise the same kinds."""
    ours = raised(ValueError, lambda: require_same("f", [1, 2], 0))
    assert is_agreed(ours)
    assert is_agreed(raised(TypeError, lambda: HostBackend().publish(None)))
    assert not is_agreed(raised(TypeError, lambda: shared.whole_pages("many")))
    assert not is_agreed(ValueError("never raised"))


def test_memory_of_a_collective_that_was_given_up_stays_alive(comm, monkeypatch):
    """MPI may still write there: it must not become a user's array."""

    class Never:
        def Test(self):  # noqa: N802  as in mpi4py
            return False

    class Memory(bytearray):
        pass

    aborts = []
    monkeypatch.setattr(mpi_agreement, "abort_at_exit", lambda why, _: aborts.append(why))
    memory = [Memory(8)]
    is_alive = weakref.ref(memory[0])
    watch = mpi_agreement.CommWatch("test", 0.0)
    wait = functools.partial(mpi_agreement.wait_request, Never(), watch, *memory)
    assert raised(PeerTimeout, wait).ranks == ()
    del wait
    assert [why.partition(":")[0] for why in aborts] == ["test failed"]
    memory.clear()
    gc.collect()
    assert is_alive()


@pytest.mark.parametrize("code", ["compiled", "python", "some of both"])
def test_a_barrier_waits_for_each_rank_every_time(comm, code, monkeypatch):
    """Between steps, which take another way, and with random delays."""
    is_python = code == "python" or (code == "some of both" and comm.rank % 2)
    monkeypatch.setenv("MPISHARE_HOST_CODE", "python" if is_python else "")
    shake, shared_shake = random.Random(comm.rank), random.Random(1)
    with Node(comm) as node:
        win = node.allocate_each(1, "i8", fill=0)
        for number in range(1, 61):
            if shake.random() < 0.1:
                time.sleep(shake.random() * 3e-3)
            win.array[0] = number
            node.synchronize()  # a barrier of the host waits for no GPU
            node.barrier()
            found = [int(win.segment(rank)[0]) for rank in range(node.size)]
            assert found == [number] * node.size
            event = shared_shake.random()
            if event < 0.1:
                node.allocate(1)
            else:
                node.barrier()

"""The node: who is in it, what it keeps apart, and what it says when it is misused."""

import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from mpi4py import MPI

from mpishare import (
    Allreduce,
    ClosedError,
    MismatchError,
    Node,
    PeerError,
    UnsupportedError,
)
from mpishare.plans.node_cache import context_of
from mpishare.runtime.report import host_pairs
from tests.helpers.children import in_a_fork
from tests.helpers.windows import check_works, fails_on

FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


def test_attributes(node, comm):
    assert (node.rank, node.size) == (comm.rank, comm.size)
    assert node.ranks == tuple(range(comm.size))
    assert node.leader == 0
    assert node.is_leader == (comm.rank == 0)
    assert node.backend in ("cuda", "host")
    assert node.xp.__name__ == {"cuda": "cupy", "host": "numpy"}[node.backend]
    assert (node.device is None) == (node.backend == "host")
    assert not node.is_closed
    assert len(set(comm.allgather(node.backend))) == 1


def test_comm_has_the_ranks_of_the_node_and_is_private(node, comm):
    # The same ranks in another context: not the given one, nor what mpishare itself talks on.
    for other in (comm, *context_of(node).comms[1:]):
        assert MPI.Comm.Compare(node.comm, other) == MPI.CONGRUENT


def test_sub_communicator_in_reverse_order(comm):
    sub = comm.Split(comm.rank % 2, key=-comm.rank)
    with Node(sub) as node:
        assert node.ranks == tuple(range(sub.size))
        assert node.rank == sub.rank
        assert node.is_leader == (sub.rank == 0)
        given = node.comm.allgather(comm.rank)
        assert given == sorted(given, reverse=True)
        check_works(node)
    sub.Free()


def test_messages_of_the_user_are_never_taken(comm):
    """Receives for anything, posted before and answered after all that mpishare does."""
    boxes = [np.zeros(1, "i8"), np.zeros(1, "i8")]
    wild = [comm.Irecv(boxes[0], MPI.ANY_SOURCE, MPI.ANY_TAG)]
    with Node(comm) as node:
        wild.append(node.comm.Irecv(boxes[1], MPI.ANY_SOURCE, MPI.ANY_TAG))
        node.allocate(5, "f4", fill=1).fence()
        node.share(lambda: [1, 2])
        node.event().close()
        node.barrier()
        taken = [request.Test() for request in wild]
        assert node.comm.allgather(taken) == [[False, False]] * node.size
        to = (comm.rank + 1) % comm.size
        own = [np.array([100]), np.array([200])]
        sends = [comm.Isend(own[0], to, 3), node.comm.Isend(own[1], to, 4)]
        MPI.Request.Waitall(wild + sends)
    assert [int(box[0]) for box in boxes] == [100, 200]


def test_close_twice(comm):
    node = Node()
    node.close()
    node.close()
    assert node.is_closed
    with Node() as other:
        other.close()
    assert other.is_closed
    assert node.comm == MPI.COMM_NULL


def test_use_after_close(comm):
    """The node, which still says what it was, and what was made of it."""
    with Node() as node:
        win, event = node.allocate((2, 3), "i4"), node.event()
        assert "shape=(2, 3), dtype=int32, owner=0" in repr(win)
        assert f"owner=0, waiters={tuple(range(1, node.size))}" in repr(event)
        with pytest.raises(TypeError, match="Node cannot be pickled"):
            pickle.dumps(node)
        assert repr(node).startswith(f"<mpishare.Node: rank={node.rank} of {node.size}, backend='")
    assert (node.rank, node.size, node.ranks) == (comm.rank, comm.size, tuple(range(comm.size)))
    assert "rank" in str(node.report())
    assert repr(node).endswith(", closed>")
    for call in (node.barrier, node.synchronize, node.event, lambda: node.allocate(1)):
        with pytest.raises(ClosedError, match=r"the node is closed\. Use it before close\(\)"):
            call()
    for call in (win.fence, event.record, event.wait, lambda: win.array):
        with pytest.raises(ClosedError):
            call()


def test_repr_of_a_broken_node(comm):
    node = Node(timeout_s=40)
    win, event = node.allocate(2), node.event()
    if comm.rank == comm.size - 1:
        context_of(node).life.leave("this test", ZeroDivisionError("broken on purpose"))
    else:
        with pytest.raises(PeerError, match="on purpose"):
            node.barrier()
    cause = "ClosedError" if comm.rank == comm.size - 1 else "PeerError"
    assert repr(node).endswith(f", broken by {cause}>")
    assert repr(win).endswith(", of a broken node>")
    assert repr(event).endswith(", of a broken node>")
    node.close()
    assert repr(node).endswith(", closed>")
    assert repr(win).endswith(", closed>")


def test_a_device_on_the_host_backend_is_not_ignored_without_a_word(caplog):
    with Node(backend="host", device=0) as node:
        said = [record.getMessage() for record in caplog.records if "device" in record.msg]
        expected = ["device=0 is ignored: the node is on the host backend"]
        assert said == (expected if node.rank == 0 else [])


def test_a_misspelled_variable_is_ignored_with_a_word(caplog, monkeypatch):
    monkeypatch.setenv("MPISHARE_ROUTES", "mpi")
    with Node(backend="host"):
        said = [record.getMessage() for record in caplog.records if "variable" in record.msg]
    is_first = MPI.COMM_WORLD.rank == 0
    assert len(said) == is_first
    assert "MPISHARE_ROUTES is ignored" in "".join(said) or not is_first


@pytest.fixture
def no_environment(monkeypatch):
    """The variable would win over the argument."""
    monkeypatch.delenv("MPISHARE_BACKEND", raising=False)


@pytest.mark.parametrize("call", [Node, partial(Allreduce, like=np.zeros(1))])
@pytest.mark.parametrize(
    ("comm", "kind"),
    [
        ("world", "str"),
        (3, "int"),
        (np.zeros(2), "ndarray"),
        (MPI.COMM_NULL, "COMM_NULL: this rank is not in it, or it was freed"),
    ],
)
def test_comm_must_be_a_communicator(call, comm, kind):
    with pytest.raises(TypeError, match=f" failed: comm must be an Intracomm, not {kind}$"):
        call(comm)


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"backend": "gpu"}, ValueError, "'gpu'"),
        ({"backend": None}, (TypeError, ValueError), "None"),
        ({"timeout_s": 0}, ValueError, "timeout_s"),
        ({"timeout_s": -1.0}, ValueError, "timeout_s"),
        ({"timeout_s": float("nan")}, ValueError, "timeout_s"),
        ({"timeout_s": float("inf")}, ValueError, "timeout_s must .* at most 1e\\+09, not inf"),
        ({"timeout_s": 2**64}, ValueError, "at most 1e\\+09, not 18446744073709551616"),
        ({"timeout_s": 10**400}, ValueError, "timeout_s"),
        ({"timeout_s": "long"}, TypeError, "timeout_s"),
    ],
)
def test_wrong_argument_on_all_ranks(no_environment, arguments, error, told):
    with pytest.raises(error, match=told) as caught:
        Node(**arguments)
    assert not isinstance(caught.value, PeerError)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("wrong", [{"backend": "gpu"}, {"timeout_s": -2}], ids=str)
def test_wrong_argument_on_one_rank(no_environment, comm, wrong):
    last = comm.size - 1
    (value,) = map(str, wrong.values())
    given = wrong if comm.rank == last else {}
    fails_on(comm, [last], ValueError, lambda: Node(**given), value)
    with Node() as node:
        check_works(node)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    ("mine", "theirs"),
    [({"backend": "host"}, {"backend": "auto"}), ({"timeout_s": 10}, {"timeout_s": 20})],
    ids=["backend", "timeout_s"],
)
def test_ranks_that_disagree_are_told_each_others_values(no_environment, comm, mine, theirs):
    with pytest.raises(MismatchError) as caught:
        Node(**(mine if comm.rank == 0 else theirs))
    others = tuple(range(1, comm.size)) if comm.rank == 0 else (0,)
    assert caught.value.ranks == others
    for value in (*mine.values(), *theirs.values()):
        assert repr(value) in str(caught.value)
    with Node() as node:
        check_works(node)


def test_backend_from_the_environment(monkeypatch):
    monkeypatch.setenv("MPISHARE_BACKEND", "host")
    for backend in ("auto", "host", "cuda"):
        with Node(backend=backend) as node:
            assert node.backend == "host"
            assert node.report().why_host is None or "MPISHARE_BACKEND" in node.report().why_host


def test_another_thread_is_refused_by_name(node):
    win, event = node.allocate(2), node.event()
    calls = [
        node.barrier,
        node.synchronize,
        lambda: node.allocate(1),
        win.fence,
        lambda: win.post([]),
        win.close,
        event.record if event.owner == node.rank else event.wait,
        event.close,
    ]
    with ThreadPoolExecutor(1) as other:
        for call in calls:
            with pytest.raises(UnsupportedError, match="thread"):
                other.submit(call).result()
    assert not win.is_closed
    assert not event.is_closed
    check_works(node)


@FORKS
def test_fork_is_refused_by_name(node):
    win = node.allocate(2)

    def is_refused(call):
        try:
            call()
        except UnsupportedError as error:
            return "fork" in str(error)

    def is_of_no_use():
        calls = node.barrier, win.fence, win.close, node.close, Node
        refused = [is_refused(call) for call in calls]
        is_said = "of a broken node>" in repr(win) or "closed" in repr(win)
        return refused[:2] == [True, True] and refused[-1] and False not in refused and is_said

    assert in_a_fork(is_of_no_use)
    check_works(node)


def test_report_of_the_host_backend(host_node):
    """Its pairs are those of `host_pairs`; tests/runtime/test_report.py tests more of them."""
    node, report = host_node, host_node.report()
    assert (report.backend, report.leader, report.can_share) == ("host", 0, True)
    assert report.pairs == host_pairs(node.size)
    assert [member.rank for member in report.members] == list(range(node.size))
    assert [member.given_rank for member in report.members] == list(node.ranks)
    assert [member.pid for member in report.members] == node.comm.allgather(os.getpid())
    assert {member.device for member in report.members} == {None}


def test_report_is_the_same_on_all_ranks_and_plain_data(node):
    data = node.report().as_dict()
    assert json.loads(json.dumps(data))["backend"] == node.backend
    everyone = node.comm.allgather(json.dumps(data))
    assert everyone == everyone[:1] * node.size
    text = str(node.report())
    assert f"{node.size} rank" in text
    assert f"backend {node.backend}" in text

"""One direction of a plan on CUDA: routes, messages and who shares a GPU, without a GPU."""

from types import SimpleNamespace

import numpy as np
import pytest

from mpishare.plans.exchange.cuda.direction import Direction
from mpishare.plans.layout import FieldLayout
from mpishare.plans.message import Message, Part, pack_messages, unpack_messages
from mpishare.runtime.route import ROUTES

LAYOUT = FieldLayout((20,), (8,), np.dtype("f8"), 0)


def message(peer, tag):
    return Message(peer, tag, (Part.of_indices(0, LAYOUT, 0, np.array([tag, 0])),))


def direction(rank, routes, uuids, *, adds=False, elsewhere=()):
    """Ranks 0 and 1 send to each other, to themselves, and to rank 2, which sends nothing."""
    size = len(routes)
    routes = [{peer: ROUTES[name] for peer, name in each.items()} for each in routes]
    sends = [[message(peer, 10 * me + peer) for peer in routes[me] if me < 2] for me in range(size)]
    recvs = [
        [message(me, each.tag) for me in range(2) for each in sends[me] if each.peer == peer]
        for peer in range(size)
    ]
    if adds:
        sends, recvs = recvs, sends
    told = {
        kind: [unpack_messages(pack_messages(found[me]), routes[me]) for me in range(size)]
        for kind, found in (("sends", sends), ("recvs", recvs))
    }
    setup = SimpleNamespace(
        comm=SimpleNamespace(rank=rank, ranks_here={r: size - 1 - r for r in range(size)}),
        context=SimpleNamespace(
            uuids=uuids[::-1], all_uuids=[*uuids[::-1], *elsewhere], rank=size - 1 - rank
        ),
        mine=[LAYOUT],
        layouts=[[LAYOUT]] * size,
        routes=routes,
        **told,
        locations=[[None]] * size,
        adds=adds,
        my_sends=sends[rank],
        my_recvs=recvs[rank],
    )
    return Direction(setup)


ALL_FUSED = [
    {0: "copy", 1: "fused", 2: "fused"},
    {0: "fused", 1: "copy", 2: "fused"},
    {0: "fused", 1: "fused"},
]
APART = ["GPU-a", "GPU-b", "GPU-c"]


def test_a_forward_direction_copies_a_ranks_own_cells_in_its_fused_kernel():
    found = direction(0, ALL_FUSED, APART)
    assert found.mine == {0: "local", 1: "fused", 2: "fused"}
    assert (found.has_fused, found.is_streamed) == (True, False)
    assert found.peers("fused") == [1, 2]
    assert [key.receiver for key, _ in found.sent("fused")] == [1, 2]
    assert [key.sender for key, _ in found.received("fused")] == [1]
    assert [(a.indices.tolist(), b.indices.tolist()) for a, b in found.local()] == [([0, 0],) * 2]
    assert [[each.route for each in sent] for sent in found.messages] == [
        ["local", "fused", "fused"],
        ["fused", "local", "fused"],
        [],
    ]


def test_the_reverse_never_uses_a_kernel_that_waits():
    found = direction(0, ALL_FUSED, APART, adds=True)
    assert found.mine == {0: "copy", 1: "copy", 2: "copy"}
    assert (found.has_fused, found.is_streamed) == (False, True)
    assert list(found.local()) == []
    assert found.peers("copy", "pinned") == [1, 2]
    assert [key.receiver for key, _ in found.sent("copy")] == [0, 1]
    assert [len(sent) for sent in found.messages] == [2, 2, 2]


@pytest.mark.parametrize(
    ("mine", "has_fused", "is_streamed"),
    [
        ({}, False, True),
        ({1: "fused"}, True, False),
        ({1: "fused", 2: "pinned"}, True, True),
        ({1: "mpi"}, False, True),
    ],
)
def test_what_an_exchange_launches(mine, has_fused, is_streamed):
    routes = [mine, *({0: mine[peer]} if peer in mine else {} for peer in (1, 2))]
    found = direction(0, routes, APART)
    assert (found.has_fused, found.is_streamed) == (has_fused, is_streamed)


def test_ranks_that_share_a_gpu():
    uuids = ["GPU-a", "GPU-b", "GPU-b"]
    found = [direction(rank, ALL_FUSED, uuids) for rank in range(3)]
    assert [each.ranks_per_gpu for each in found] == [1, 2, 2]
    assert all(each.sharing == {1, 2} for each in found)
    assert not found[0].shares_gpu(0)
    assert found[0].shares_gpu(1)
    assert found[1].shares_gpu(0)


def test_ranks_of_another_node_share_a_gpu_too():
    """Those of containers of one machine: kernels that wait must leave room for theirs."""
    found = direction(0, ALL_FUSED, APART, elsewhere=["GPU-a", "GPU-d"])
    assert (found.ranks_per_gpu, found.sharing) == (2, {0})
    assert direction(1, ALL_FUSED, APART, elsewhere=["GPU-a"]).ranks_per_gpu == 1

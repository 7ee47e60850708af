"""The report as text and as data."""

import copy
import json
import pickle
from dataclasses import replace

import pytest

from mpishare.backends import Device
from mpishare.runtime.report import Member, Pair, Report, host_pairs
from mpishare.runtime.route import ROUTES, between

GPUS = [
    Device(
        ordinal=0,
        uuid=f"GPU-{number:08x}-aaaa",
        pci_id=f"0000:{number:02x}:00.0",
        name="H200",
        mps=False,
        compute_capability="9.0",
        driver="580.159 (CUDA 13.0)",
    )
    for number in range(2)
]


def member(rank, device=None):
    return Member(rank=rank, given_rank=rank + 4, host="n7", pid=100 + rank, device=device)


def pair(origin, target, *, memory=True, reason=None):
    return Pair(
        origin=origin,
        target=target,
        memory=memory,
        copy=memory,
        kernel=memory,
        counters=True,
        link="self" if origin == target else "NVLink",
        route=between(memory, is_self=origin == target, is_time_sliced=False),
        reason=reason,
    )


def report(*pairs, notes=(), why_host=None):
    return Report("cuda", why_host, 0, (member(0, GPUS[0]), member(1, GPUS[1])), pairs, notes)


WHOLE = [pair(origin, target) for origin in range(2) for target in range(2)]


def test_text():
    """Of a pair whose memory cannot be shared it says why not."""
    why_not = pair(0, 1, memory=False, reason="cuIpcOpenMemHandle failed")
    text = str(report(WHOLE[0], why_not, *WHOLE[2:], notes=("start MPS",)))
    lines = text.splitlines()
    assert lines[0] == "node n7: 2 ranks, backend cuda"
    assert lines[1].startswith("  rank 0 (rank 4 of all nodes), pid 100, GPU ")
    assert "GPU-00000000" in lines[1]
    assert "H200 at 0000:00:00.0" in lines[1]
    assert lines[1].endswith(", leader")
    assert "leader" not in lines[2]
    assert [line.split()[1:] for line in lines[5:7]] == [["self", "-"], ["NVLink", "self"]]
    assert "rank 0 to rank 1: cuIpcOpenMemHandle failed" in text
    assert lines[-1] == "  start MPS"
    assert text == text.rstrip()


@pytest.mark.parametrize(
    ("fact", "silent", "words"),
    [
        ({"gpu_messages": ""}, "messages", "messages to other nodes go out of GPU memory"),
        ({"gpu_messages": "SIGSEGV"}, "messages", "through host memory: SIGSEGV"),
        (
            {"unreadable": ((0, 1, "No such process"),)},
            "CMA",
            "memory of rank 1: No such process\n",
        ),
    ],
)
def test_what_was_tried_is_said(fact, silent, words):
    found = report(*WHOLE)
    assert silent not in str(found)
    assert words in str(replace(found, **fact))


def test_the_host_backend():
    """It says why it is one; a rank of the same number in the node and in all is named once."""
    host = Report("host", "no NVIDIA driver", 0, (member(0),), host_pairs(1), ())
    assert str(host).splitlines()[0] == "node n7: 1 rank, backend host (no NVIDIA driver)"
    assert host.can_share
    alone = replace(host, members=(replace(member(0), given_rank=0),))
    assert str(alone).splitlines()[1] == "  rank 0, pid 100, leader"


@pytest.mark.parametrize(
    ("is_one_gpu", "has_mps", "shares_gpu"),
    [
        (True, (False, False), True),
        (True, (True, True), False),
        (True, (True, False), True),
        (False, (False, False), False),
    ],
)
def test_where_ranks_share_a_gpu_without_mps(is_one_gpu, has_mps, shares_gpu):
    devices = [
        replace(GPUS[0 if is_one_gpu else rank], mps=mps) for rank, mps in enumerate(has_mps)
    ]
    members = tuple(member(rank, device) for rank, device in enumerate(devices))
    found = Report("cuda", None, 0, members, tuple(WHOLE), ())
    assert found.time_sliced_gpus == ((GPUS[0].uuid,) if shares_gpu else ())
    assert ("MPS" in str(replace(found, notes=()))) == any(has_mps)


def test_a_route_is_its_name_with_properties():
    """Also after a pickle, as reports are gathered, and a copy, as `asdict` makes one."""
    for name, route in ROUTES.items():
        assert route == name
        assert repr(route) == repr(name)
        assert json.loads(json.dumps(route)) == name
        assert pickle.loads(pickle.dumps(route)) is copy.deepcopy(route) is route

"""Memory of GPUs between ranks in containers of their own, pretended by unshare."""

import os

import pytest

from tests.helpers.isolation import separate_ranks, why_no_namespaces
from tests.helpers.launch import run_ranks

REASON = why_no_namespaces()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.skipif(
        "CUDA_MPS_PIPE_DIRECTORY" in os.environ, reason="containers under MPS were not tried"
    ),
]

PROGRAM = """
import cupy as cp
from mpi4py import MPI
import mpishare
from tests.helpers.reporting import report

world = MPI.COMM_WORLD
with mpishare.Node(backend="cuda", timeout_s=30) as node:
    field = cp.full((66, 66), float(world.rank))
    with mpishare.HaloExchange(
        world, field, width=1, dims=(world.size, 1), periods=(True, False), node=node
    ) as halo:
        halo.exchange(field)
        node.synchronize()
        routes = sorted(set(halo.routes.values()))
    ghosts = [float(field[0, 5].get()), float(field[-1, 5].get())]
    try:
        event = node.event(owner=0)
        if node.rank == 0:
            event.record()
        else:
            event.wait()
        node.synchronize()
        refusal = ""
    except mpishare.UnsupportedError as error:
        refusal = str(error)
    pairs = [pair for pair in node.report().pairs if pair.origin != pair.target]
    report({
        "size": node.size, "ghosts": ghosts, "routes": routes, "text": str(node.report()),
        "memory": [pair.memory for pair in pairs], "events": [pair.events for pair in pairs],
        "reasons": [pair.reason for pair in pairs], "refusal": refusal,
    })
"""


def played(own, monkeypatch, folder):
    """What two ranks report, whose ghosts are right whatever they share."""
    separate_ranks(monkeypatch, folder, own, is_init="other ids" not in own)
    # MPICH's UCX opens /proc/PID of the other one.
    tcp = {"UCX_TLS": "tcp,self"} if "other ids" in own else {}
    result = run_ranks(2, PROGRAM, env=tcp)
    assert result.returncode == 0, result.describe()
    for rank, told in result.reports.items():
        assert told["size"] == 2, result.describe()
        assert told["ghosts"] == [1 - rank] * 2, result.describe()
    return list(result.reports.values())


@pytest.mark.parametrize(
    "own", [["mount"], ["ipc", "uts"], ["net"], ["pid", "other ids"]], ids=" ".join
)
def test_memory_is_shared(own, monkeypatch, tmp_path):
    """Only process ids that are equal are in the way."""
    for told in played(own, monkeypatch, tmp_path):
        assert told["memory"] == [True, True], told["text"]
        assert told["events"] == [True, True], told["text"]
        assert told["refusal"] == ""
        assert told["routes"] in (["fused"], ["copy"])


def test_equal_process_ids(monkeypatch, tmp_path):
    """The driver takes the memory of the other one for its own; the cells go by pinned memory.

    Both have their events in one file of /dev/shm, which CUDA names by the process id.
    """
    check_refusals(played(["pid"], monkeypatch, tmp_path))


def test_equal_process_ids_in_other_user_and_ipc_namespaces(monkeypatch, tmp_path):
    """There CUDA can make no such events at all."""
    check_refusals(played(["user", "pid", "ipc"], monkeypatch, tmp_path))


def check_refusals(reports):
    """Neither memory nor events are shared, the reasons have the remedy, the ghosts are right."""
    for told in reports:
        assert told["memory"] == [False, False], told["text"]
        assert told["events"] == [False, False], told["text"]
        assert all("--pid=host" in reason for reason in told["reasons"])
        assert "by which CUDA names its events" in told["refusal"]
        assert told["routes"] == ["pinned"]

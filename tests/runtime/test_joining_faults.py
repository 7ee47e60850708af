"""Jobs that join: of two mpiruns that meet at a port, and of ranks that are spawned."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helpers.launch import launcher, run_ranks, run_right

pytestmark = pytest.mark.both_mpis

USE = """
import mpishare
from tests.helpers.reporting import report

def use(merged):
    with mpishare.Node(merged, timeout_s=30) as node:
        window = node.allocate(node.size, "i8", fill=-1)
        window.array[node.rank] = 10 * node.rank
        window.fence()
        report({"rank": node.rank, "ranks": node.ranks, "seen": window.array.tolist()})
        node.barrier()
"""
MEET = """
import sys
from pathlib import Path
from mpi4py import MPI
from mpishare.coordination.poll import poll

world, place = MPI.COMM_WORLD, Path(sys.argv[2])
is_server = sys.argv[1] == "server"
if world.rank == 0 and is_server:
    place.with_suffix(".new").write_text(MPI.Open_port())
    place.with_suffix(".new").replace(place)
elif world.rank == 0:
    assert poll(place.exists, 30, pause_s=0.05)
port = world.bcast(place.read_text() if world.rank == 0 else None)
joined = world.Accept(port) if is_server else world.Connect(port)
merged = joined.Merge(high=not is_server)
use(merged)
merged.Free()
joined.Disconnect()
"""
SPAWN = """
import os, sys
from mpi4py import MPI

parent = MPI.Comm.Get_parent()
is_child = parent != MPI.COMM_NULL
if is_child:  # its launcher calls it rank 0 as well
    os.environ["REPORT_DIR"] = sys.argv[1]
    joined = parent
else:
    joined = MPI.COMM_WORLD.Spawn(sys.executable, [__file__, sys.argv[1]], maxprocs=2)
merged = joined.Merge(high=is_child)
use(merged)
merged.Free()
joined.Disconnect()
"""


def check(told: list[dict], size: int) -> None:
    """All ranks were one node, in the order of the merge, and saw each other's stores."""
    assert sorted(facts["rank"] for facts in told) == list(range(size))
    for facts in told:
        assert facts["ranks"] == list(range(size))
        assert facts["seen"] == [10 * rank for rank in range(size)]


def test_two_jobs_that_meet_at_a_port(tmp_path):
    if launcher()[1] == "openmpi":
        pytest.skip("two mpiruns of Open MPI 5 meet under a common PRRTE server only")
    place = str(tmp_path / "port")
    with ThreadPoolExecutor() as pool:
        jobs = [
            pool.submit(run_ranks, count, USE + MEET, args=[role, place])
            for count, role in ((2, "server"), (3, "client"))
        ]
        results = [job.result() for job in jobs]
    for result in results:
        assert result.returncode == 0, result.describe()
    check([facts for result in results for facts in result.reports.values()], 5)


def test_ranks_that_are_spawned(tmp_path):
    result = run_right(2, USE + SPAWN, [str(tmp_path)])
    children = [json.loads(file.read_text()) for file in tmp_path.glob("[0-9].json")]
    check([*result.reports.values(), *children], 4)

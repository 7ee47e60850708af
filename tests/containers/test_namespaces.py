"""A rank per container, pretended by unshare: what each shares with the others, one row per test.

The rows are those of docs/containers.md. Root alone can pretend containers.
"""

import sys
import tempfile

import pytest

from tests.helpers.isolation import separate_ranks, why_no_namespaces
from tests.helpers.launch import launcher, run_ranks, run_right
from tests.helpers.scenes import play
from tests.helpers.stage import Stage

REASON = why_no_namespaces()
pytestmark = [pytest.mark.both_mpis, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

PROGRAM = """
import logging, os
import numpy as np
from mpi4py import MPI
import mpishare
from tests.helpers.reporting import report

world = MPI.COMM_WORLD
with mpishare.Node(backend="host") as node:
    window = node.allocate(node.size, "i8", fill=-1)
    window.array[node.rank] = 10 * node.rank
    window.fence()
    faces = np.full((4, 32768), float(world.rank))  # large: read from the process
    with mpishare.HaloExchange(
        world, faces, width=1, axes=(0,), dims=(world.size,), periods=(True,), node=node
    ) as halo:
        halo.exchange(faces)
        routes = sorted(set(halo.routes.values()))
    try:
        pool = node.pool()
        array = pool.allocate(8, "i8") if node.rank == 0 else None
        if node.rank == 0:
            array[...] = 7
        handle = node.comm.bcast(pool.handle(array) if node.rank == 0 else None)
        seen = int(array[0]) if node.rank == 0 else int(pool.open(handle)[0])
    except mpishare.MpiShareError as error:
        seen = str(error)
    found = node.report()
    report({
        "size": node.size, "window": window.array.tolist(), "pool": seen, "routes": routes,
        "ghosts": [faces[0, 0], faces[-1, 0]], "text": str(found), "notes": list(found.notes),
        "host": found.members[0].host,
        "unreadable": [list(pair) for pair in found.unreadable],
    })
    node.barrier()
"""


def played(own, monkeypatch, folder, **options):
    """The reports of two ranks, each with its own of something; their ghosts are right."""
    separate_ranks(monkeypatch, folder, own)
    result = run_right(2, PROGRAM, **options)
    for rank in range(2):
        assert result.reports[rank]["ghosts"] == [1 - rank] * 2, result.describe()
    return result


def is_one_node(result):
    """Whether they share windows and pools."""
    told = result.reports.values()
    seen = [(each["size"], each["window"], each["routes"]) for each in told]
    return seen == [(2, [0, 10], ["host"])] * 2


@pytest.mark.parametrize("own", [["mount"], ["ipc", "uts"]], ids=" ".join)
def test_one_node_with_everything(own, monkeypatch, tmp_path):
    """Apptainer's default is the first; host names that differ make no second node."""
    result = played(own, monkeypatch, tmp_path)
    assert is_one_node(result), result.describe()
    for rank, told in result.reports.items():
        assert told["unreadable"] == []
        assert told["pool"] == 7
        assert told["notes"] == []
        assert "uts" not in own or told["host"] == "container-0", (rank, told)


@pytest.mark.parametrize("kind", ["pid", "user"])
def test_no_reads_from_process_to_process(kind, monkeypatch, tmp_path):
    """Large faces are packed instead, and the report says which option mends it."""
    # Open MPI crashes where process ids are equal: see the next test.
    tcp = {"OMPI_MCA_btl": "self,tcp"} if kind == "pid" else {}
    result = played([kind], monkeypatch, tmp_path, env=tcp)
    assert is_one_node(result), result.describe()
    for told in result.reports.values():
        assert [each[:2] for each in told["unreadable"]] == [[0, 1], [1, 0]]
        assert f"--{kind}ns=host" in told["text"] or f"--{kind}=host" in told["text"]


def test_other_process_ids_under_mpich(monkeypatch, tmp_path):
    """Its UCX looks for the other one in /proc, and fails at its start; it need not use that."""
    if launcher()[1] != "mpich":
        pytest.skip("Open MPI does not mind")
    separate_ranks(monkeypatch, tmp_path, ["pid", "other ids"], is_init=False)
    refused = run_ranks(2, PROGRAM)
    assert "Fatal error in internal_Init_thread" in refused.stderr, refused.describe()
    result = run_right(2, PROGRAM, env={"UCX_TLS": "tcp,self"})
    assert is_one_node(result)


@pytest.mark.parametrize("own", ["shm", "folder"])
def test_another_dev_shm_is_another_node(own, monkeypatch, tmp_path):
    """The same kernel and host name, and with "folder" the same device too."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        monkeypatch.setenv("SHM_FOLDER", folder)
        result = played([own], monkeypatch, tmp_path, env={"MPIR_CVAR_NOLOCAL": "1"})
    for rank, told in result.reports.items():
        assert (told["size"], told["window"], told["routes"]) == (1, [0], ["mpi"])
        (note,) = told["notes"]
        assert note.startswith(f"the machine of rank {rank} also runs rank {1 - rank} ")
        assert "--ipc=host" in note
    is_told_shared = launcher()[1] == "openmpi"  # which then says so without being asked
    assert result.stderr.count("--ipc=host") == is_told_shared, result.describe()


def test_info_where_mpi_never_starts(monkeypatch, tmp_path):
    """MPICH waits for ever in MPI_Init; the report tool ends, with where that was."""
    if launcher()[1] != "mpich":
        pytest.skip("Open MPI does not wait")
    separate_ranks(monkeypatch, tmp_path, ["shm", "pid"])
    result = run_ranks(2, [sys.executable, "-m", "mpishare.info", "--timeout-s", "1"])
    assert not result.timed_out, result.describe()
    assert result.returncode != 0
    assert "in load_mpi" in result.stderr, result.describe()


def test_another_network(monkeypatch, tmp_path):
    """Windows and halos are shared all the same; pools, which need a socket, are refused."""
    if launcher()[1] != "mpich":
        separate_ranks(monkeypatch, tmp_path, ["net"])
        result = run_ranks(2, PROGRAM)  # which cannot reach its launcher
        assert not result.timed_out, result.describe()
        assert result.returncode != 0
        return
    result = played(["net"], monkeypatch, tmp_path)
    assert is_one_node(result), result.describe()
    assert all("another network namespace" in told["pool"] for told in result.reports.values())


def dies(stage: Stage) -> None:
    """Rank 1 is killed while the other one waits for it."""
    node = stage.node()
    node.barrier()
    if stage.rank == 1:
        stage.die()
    stage.attempt("barrier", node.barrier)


def test_a_death_in_another_pid_namespace(monkeypatch, tmp_path):
    """The kernel ends the lock of the process, whatever its number is here."""
    if launcher()[1] != "mpich":
        pytest.skip("without shared memory Open MPI itself ends the job")
    separate_ranks(monkeypatch, tmp_path, ["pid"], is_init=False)
    played = play(2, dies, survivable=True)
    assert played.raised(0, "barrier", "PeerTimeout").ranks == [1]

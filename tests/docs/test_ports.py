"""What the pages on ports show is as short as they say, fits its version, and moves cells.

`scripts/ports` runs the codes themselves, which takes a network and some minutes.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT
from tests.helpers.launch import run_right
from tests.helpers.planted import NOBODY, needs_two_users

PORTS = ["veros", "mpi4py_fft", "heat", "quatrex"]
PATCH = ROOT / "docs/ports/veros.patch"
PAGE = ROOT / "docs/ports/veros.md"
PLUG_IN = ROOT / "docs/ports/mpishare_fft.py"
HEAT = ROOT / "docs/ports/mpishare_heat.py"
QUATREX = ROOT / "docs/ports/mpishare_quatrex.py"

#: Veros' settings and neighbors on two ranks along x, then the lines that the patch adds.
PROGRAM = """
import numpy as np
from mpi4py import MPI

class rs:
    backend, num_proc, mpi_comm = "numpy", (2, 1), MPI.COMM_WORLD

SCATTERED_DIMENSIONS = (("xt", "xu"), ("yt", "yu"))
rank = MPI.COMM_WORLD.rank

def get_process_neighbors(cyclic):
    west, east = (1 - rank if cyclic or side != rank else None for side in (0, 1))
    return {"west": west, "east": east, "south": None, "north": None}

TABLE

def exchange_overlap(arr, d1, d2, cyclic):
BLOCK

whole = np.arange(12 * 7 * 3.0).reshape(12, 7, 3)  # twelve cells along x, no ghosts there
for cyclic in True, False:
    for dtype in "f8", "i4":
        index = (np.arange(6 * rank - 2, 6 * rank + 8)) % 12
        arr = whole[index].astype(dtype)
        expected = arr.copy()
        arr[:2] = arr[-2:] = -1
        if not cyclic:  # beyond the wall nothing is exchanged
            wall = np.s_[:2] if rank == 0 else np.s_[-2:]
            expected[wall] = -1
        given = arr.copy()
        for _ in range(3):
            found = exchange_overlap(arr, "xt", "yt", cyclic)
            assert (found == expected).all(), (cyclic, dtype)
            assert (arr == given).all()
print("exchanged")
"""


def added(text: str) -> list[list[str]]:
    """The lines that each hunk adds."""
    hunks = re.split(r"^@@ .*\n", text, flags=re.MULTILINE)[1:]
    return [[line[1:] for line in hunk.splitlines() if line[:1] == "+"] for hunk in hunks]


def test_the_patch_is_as_short_as_the_page_says() -> None:
    lines = PATCH.read_text().splitlines()
    plus, minus = (
        sum(line[:1] == sign and line[:4] != 3 * sign + " " for line in lines) for sign in "+-"
    )
    assert [line for line in lines if line[:4] == "+++ "] == ["+++ b/veros/distributed.py"]
    assert 0 < plus + minus <= 15
    assert f"| lines changed | | {plus} added, {minus} removed |" in PAGE.read_text()


@pytest.mark.parametrize(
    ("plug_in", "page", "most"),
    [(PLUG_IN, "mpi4py_fft.md", 60), (HEAT, "heat.md", 230), (QUATREX, "quatrex.md", 150)],
)
def test_the_plug_in_is_as_short_as_the_page_says(plug_in, page: str, most: int) -> None:
    lines = len(plug_in.read_text().splitlines())
    assert lines <= most
    assert f"It is {lines} lines:" in plug_in.with_name(page).read_text()


@pytest.mark.parametrize("name", PORTS)
def test_the_page_and_the_script_are_for_the_same_version(name: str) -> None:
    script = ROOT / "scripts/ports" / name
    (version,) = re.findall(r"^version=v?(.*)$", script.read_text(), re.MULTILINE)
    assert f"version {version}," in (ROOT / f"docs/ports/{name}.md").read_text()


def test_the_lines_of_the_patch_exchange(tmp_path) -> None:
    table, block = added(PATCH.read_text())
    program = tmp_path / "program.py"
    text = PROGRAM.replace("TABLE", "\n".join(table)).replace("BLOCK", "\n".join(block))
    program.write_text(text)
    done = run_right(2, [sys.executable, "-m", "mpi4py", str(program)], timeout_s=40)
    assert done.stdout.count("exchanged") == 2


def run_plug_in(folder, ranks, package, modules, plug_in, calls, *, timeout_s) -> None:
    """Make these calls with the plug-in, beside modules that stand for those of its code."""
    for name, text in modules.items():
        (package / f"{name}.py").write_text(text)
    shutil.copy(plug_in, folder)
    program = folder / "program.py"
    program.write_text(calls)
    done = run_right(ranks, [sys.executable, "-m", "mpi4py", str(program)], timeout_s=timeout_s)
    assert done.stdout.count("moved") == ranks


#: mpi4py-fft's `Transfer` as far as the plug-in knows it; its messages leave a mark instead.
PENCIL = """
import numpy as np

class Transfer:
    def __init__(self, comm, shape, dtype, subshapeA, axisA, subshapeB, axisB):
        self.comm, self.shape, self.dtype = comm, tuple(shape), np.dtype(dtype)
        self.subshapeA, self.axisA = tuple(subshapeA), axisA
        self.subshapeB, self.axisB = tuple(subshapeB), axisB

    def forward(self, given, out):
        out[...] = -1

    backward = forward
"""

TRANSFERS = """
import mpishare
import mpishare_fft
import numpy as np
from mpi4py import MPI
from mpi4py_fft import pencil

class DistArray(np.ndarray):
    pass

comm = MPI.COMM_WORLD.Dup()
shape = (7, 3, 5)
with mpishare.Node(backend="host") as node:
    mpishare_fft.use(node)
    for dtype in "fdFDgG":
        whole = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
        first = np.array_split(whole, comm.size, 2)[comm.rank]  # aligned in axis 0
        second = np.array_split(whole, comm.size, 0)[comm.rank]
        for _ in range(2):  # as `DistArray.redistribute` does
            transfer = pencil.Transfer(comm, shape, dtype, first.shape, 0, second.shape, 2)
            a, b = first.copy().view(DistArray), np.empty_like(second)
            transfer.forward(a, b)
            assert (b == (-1 if dtype == "G" else second)).all(), dtype
            b = second.copy()
            transfer.backward(b, a)
            assert (a == (-1 if dtype == "G" else first)).all(), dtype
    assert len(comm.Get_attr(mpishare_fft.PLANS) or "12345") == 5  # one of each but "G"
    mpishare_fft.use(None)
    assert pencil.Transfer is mpishare_fft.messages
    comm.Free()
print("moved")
"""


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_plug_in_moves_what_a_transfer_moves(ranks: int, tmp_path) -> None:
    package = tmp_path / "mpi4py_fft"
    package.mkdir()
    run_plug_in(tmp_path, ranks, package, {"pencil": PENCIL}, PLUG_IN, TRANSFERS, timeout_s=40)


#: Heat as far as the plug-in knows it; its messages return a mark instead.
MODULES = {
    "communication": """
class MPICommunication:
    def __init__(self, handle):
        self.handle, self.rank, self.size = handle, handle.rank, handle.size

    def __getattr__(self, name):
        return getattr(self.handle, name)

    def Allreduce(self, *given, **named):
        return "message"

    Bcast = Allgatherv = Allreduce
""",
    "dndarray": """
import torch

class DNDarray:
    def __init__(self, comm, whole, split):
        self.comm, self.split, self.gshape = comm, split, tuple(whole.shape)
        parts = torch.tensor_split(whole, comm.size, split)
        self.larray = parts[comm.rank].clone()
        self.lshape_map = torch.tensor([part.shape for part in parts])

    def is_distributed(self):
        return self.comm.size > 1

    def get_halo(self, halo_size, prev=True, next=True):
        return "message"
""",
    "manipulations": """
def _axis2axisResplit(*given):
    return "message"
""",
}

HEAT_CALLS = """
import mpishare
import mpishare_heat
import torch
from heat.core import communication, dndarray, manipulations
from mpi4py import MPI

class Tiles:
    def __init__(self, array):
        self.lshape_map = array.lshape_map

torch.set_num_threads(1)
comm = communication.MPICommunication(MPI.COMM_WORLD.Dup())
rank, size = comm.rank, comm.size
mpishare_heat.LEAST_SUM = mpishare_heat.LEAST_BCAST = 0
MARK = "message"

def check(turn, dtype):
    by_plan = turn > 0 and dtype != torch.bfloat16  # the first call is by messages
    whole = (torch.arange(size * 12.0).reshape(2, 2 * size, 3) + turn).to(dtype)
    parts = torch.tensor_split(whole, size, 1)
    array = dndarray.DNDarray(comm, whole, 1)
    wanted = torch.tensor_split(whole, size, 2)[rank]
    out = torch.empty_like(wanted)
    given = array.larray, 1, Tiles(array), out, 2, None, comm
    assert (manipulations._axis2axisResplit(*given) is MARK) != by_plan
    assert not by_plan or torch.equal(out, wanted)

    assert (array.get_halo(1, prev=False) is MARK) != by_plan
    if by_plan:
        found, end = array._DNDarray__halo_next, 2 * rank + 2
        assert array._DNDarray__halo_prev is None
        assert rank == size - 1 or torch.equal(found, whole[:, end : end + 1])

    out, counts = torch.empty_like(whole), [2] * size
    received = out, counts, [2 * each for each in range(size)]
    assert (comm.Allgatherv(array, received, recv_axis=1) is MARK) != by_plan
    assert not by_plan or torch.equal(out, whole)

    sent = whole.clone() if rank == 1 else torch.zeros_like(whole)
    sent = sent.transpose(0, 2)  # with gaps
    assert (comm.Bcast(sent, root=1) is MARK) != by_plan
    assert not by_plan or torch.equal(sent, whole.transpose(0, 2))

    out = torch.empty_like(whole)
    is_added = by_plan and dtype != torch.bool
    assert (comm.Allreduce(whole.transpose(0, 1), out, op=MPI.SUM) is MARK) != is_added
    assert not is_added or torch.equal(out.reshape(-1), size * whole.transpose(0, 1).reshape(-1))
    is_combined = by_plan and not dtype.is_floating_point
    mine = torch.full((3,), rank).to(dtype)
    assert (comm.Allreduce(MPI.IN_PLACE, mine, op=MPI.LOR) is MARK) != is_combined
    assert not is_combined or torch.equal(mine, torch.full((3,), size > 1).to(dtype))
    assert comm.Allreduce(MPI.IN_PLACE, whole, op=MPI.MAXLOC) is MARK

with mpishare.Node(backend="host") as node:
    mpishare_heat.use(node)
    for dtype in torch.float32, torch.int64, torch.bool, torch.bfloat16:
        for turn in range(3):
            check(turn, dtype)
    mpishare_heat.MOST_PLANS = 2  # the oldest are dropped, and made again
    for count in 1, 2, 3, 4:
        for _ in range(3):
            x = torch.full((count,), rank)
            found = comm.Allreduce(MPI.IN_PLACE, x, op=MPI.MAX)
        assert found is x
        assert torch.equal(x, torch.full((count,), size - 1))
    assert len(comm.handle.Get_attr(mpishare_heat.PLANS)) == 2
    mpishare_heat.use(None)
    assert comm.Bcast(torch.zeros(3)) is MARK
    comm.handle.Free()
print("moved")
"""


@pytest.mark.timeout(300)  # on a busy machine PyTorch takes a minute to be imported
def test_the_plug_in_does_what_heat_does(tmp_path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    package = tmp_path / "heat/core"
    package.mkdir(parents=True)
    run_plug_in(tmp_path, 2, package, MODULES, HEAT, HEAT_CALLS, timeout_s=200)


#: QuaTrEx as far as the plug-in knows it; its messages are errors instead.
QTTOOLS = {
    "__init__": "import numpy as xp",
    "comm/__init__": "from qttools.comm.comm import Communicator\n\ncomm = Communicator()",
    "comm/comm": """
import numpy as np
from mpi4py import MPI

class _SubCommunicator:
    def __init__(self, mpi_comm, config):
        _SubCommunicator._validate_config(config)
        self._mpi_comm, self._config, self._group_start_called = mpi_comm, config, False
        self.rank, self.size = mpi_comm.rank, mpi_comm.size

    @classmethod
    def _validate_config(cls, config):
        if {*config.values()} - {"messages"}:
            raise ValueError(config)

    def all_to_all(self, *given, **named):
        raise LookupError("a message")

    all_gather = all_reduce = bcast = all_to_all

class Communicator:
    def configure(self, config):
        self.stack = _SubCommunicator(MPI.COMM_WORLD, config)

_check_bufs_aliased = np.shares_memory
""",
    "datastructures": """
class DSDBSparse:
    def dtranspose(self, discard=False):
        raise LookupError("a message")
""",
}

QUATREX_CALLS = """
import mpishare
import mpishare_quatrex
import numpy as np
from mpi4py import MPI
from qttools.comm import comm
from qttools.datastructures import DSDBSparse

size, rank = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
OURS = dict.fromkeys(mpishare_quatrex.COLLECTIVES, "mpishare")

def refused(kind, call, *given, **named):
    try:
        call(*given, **named)
    except kind:
        return
    raise SystemExit(f"not refused: {call}")

def check(count, dtype):
    whole = np.arange(size * size * count).reshape(size, size, count).astype(dtype)
    stack, found = comm.stack, np.empty_like(whole[0])
    stack.all_to_all(whole[rank], found)
    assert (found == whole[:, rank]).all()
    stack.all_gather(whole[rank, 0], found)
    assert (found == whole[:, 0]).all()
    found[rank] = whole[rank, 0]  # where it belongs
    found[rank - 1] = -1
    stack.all_gather(found[rank], found)
    assert size == 1 or (found == whole[:, 0]).all()
    stack.all_reduce(whole[rank], found, op="sum")
    assert (found == whole.sum(0)).all()
    found[...] = whole[rank]
    stack.all_reduce(found, found)
    assert (found == whole.sum(0)).all()
    found[...] = whole[1 % size] if rank == size - 1 else -1
    stack.bcast(found, root=size - 1)
    assert (found == whole[1 % size]).all()

def transpose(length, extents, last):
    matrix, parts = DSDBSparse(), np.array_split(np.arange(length), size)
    heights = [part.size for part in parts]
    width = -(-last // size)
    whole = np.arange(length * np.prod(extents, dtype=int) * width * size)
    whole = whole.reshape(length, *extents, -1).astype(complex)
    matrix.global_stack_shape, matrix.stack_section_sizes = (length, *extents), heights
    matrix.total_stack_size, matrix.total_nnz_size = max(heights) * size, width * size
    matrix._data = np.full((max(heights), *extents, width * size), -1, complex)
    matrix._data[: heights[rank]] = whole[parts[rank]]
    matrix.distribution_state = "stack"
    for _ in range(2):
        matrix.dtranspose()
        assert matrix.distribution_state == "nnz"
        assert matrix._data.shape == (max(heights) * size, *extents, width)
        assert (matrix._data[:length] == whole[..., rank * width : (rank + 1) * width]).all()
        assert not matrix._data[length:].any()
        matrix.dtranspose()
        assert matrix.distribution_state == "stack"
        assert matrix._data.shape == (max(heights), *extents, width * size)
        assert (matrix._data[: heights[rank]] == whole[parts[rank]]).all()
        assert not matrix._data[heights[rank] :].any()
    refused(LookupError, matrix.dtranspose, discard=True)

with mpishare.Node(backend="host") as node:
    mpishare_quatrex.use(node)
    comm.configure(OURS)
    for dtype in "f4", "i8", "c16":
        for count in 1, 5:
            check(count, dtype)
    for shape in ((5, (), 7), (7, (2, 3), 4)):
        transpose(*shape)
    mpishare_quatrex.MOST_PLANS = 2  # the oldest are dropped, and made again
    comm.configure(OURS)
    for _ in range(2):
        check(2, "f8")
    assert len(comm.stack.plans) == 2
    given, gaps = np.zeros(4 * size), np.zeros((4 * size, 2))[:, 0]
    refused(ValueError, comm.stack.all_to_all, given, gaps)
    refused(LookupError, comm.stack.all_to_all, given, given.copy(), backend="messages")
    comm.stack._group_start_called = True
    refused(LookupError, comm.stack.bcast, given)  # QuaTrEx refuses it there
    refused(ValueError, comm.configure, OURS | {"send_recv": "mpishare"})
    mpishare_quatrex.use(None)
    comm.configure({"bcast": "messages"})
    refused(LookupError, comm.stack.bcast, given)
    refused(LookupError, DSDBSparse().dtranspose)
print("moved")
"""


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_back_end_of_quatrex_moves_what_its_messages_do(ranks: int, tmp_path) -> None:
    (tmp_path / "qttools/comm").mkdir(parents=True)
    package = tmp_path / "qttools"
    run_plug_in(tmp_path, ranks, package, QTTOOLS, QUATREX, QUATREX_CALLS, timeout_s=60)


@needs_two_users
@pytest.mark.parametrize("name", PORTS)
def test_a_folder_of_another_user_is_refused(name, tmp_path):
    """Its programs would be run: the page names a folder in /tmp, which anybody can make first."""
    os.chown(tmp_path, NOBODY, NOBODY)
    done = subprocess.run(
        [ROOT / "scripts/ports" / name, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"{tmp_path} belongs to another user" in done.stderr
